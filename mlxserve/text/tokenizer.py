"""Text to token ids and back, the same whether a model comes as GGUF or as a directory.

A tokenizer never changes after it is built, so any thread may use it; encoding releases the GIL, so
that a long prompt being tokenised elsewhere doesn't hold up the engine's step.
"""

import functools
import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

from mlxserve.errors import ContextError, RequestError
from mlxserve.text.bounds import Bound, bound_of
from mlxserve.text.chat import ChatTemplate
from mlxserve.text.gguf_vocab import read_gguf_vocab
from mlxserve.text.hf_files import read_directory
from mlxserve.text.parts import TokenizerParts
from mlxserve.text.stream import StreamDecoder


class Tokenizer:
    """A model's tokenizer and its chat templates.

    prefix_ids: those that the model wants before a plain prompt.
    bos_id: the beginning-of-text id, or None.
    eos_ids: ids that end an answer.
    special_ids: ids that are no text, unless a stream is asked to keep them.
    vocab_size: ids are below it (a model's logits may be padded beyond it).
    chat_templates: Jinja sources by name; chat_template: the default one, or None.
    decoding: how tokens become bytes.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.prefix_ids = parts.prefix_ids
        self._templates = {
            name: ChatTemplate(source, parts.special_tokens)
            for name, source in parts.chat_templates.items()
        }
        added = parts.backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Filled as tokens are met: threads may both compute an entry, and get the same bytes.
        self._bytes: dict[int, bytes] = {}
        self.decoding = parts.decoding
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.chat_templates = dict(parts.chat_templates)
        self.vocab_size = _vocab_size(parts)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """From a GGUF file's metadata, as plain Python values under the file's own keys.

        Raises ModelError naming the key that is missing, damaged, or of a kind not supported.
        """
        return cls(read_gguf_vocab(metadata))

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """From a directory in Hugging Face's layout.

        Only tokenizer.json must be there, or else tokenizer.model (SentencePiece's).

        Raises ModelError naming the file that is missing, damaged, or of a kind not supported.
        """
        return cls(read_directory(Path(path)))

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """What special tokens are called."""
        return frozenset(self.token_bytes(token).decode() for token in self.special_ids)

    @cached_property
    def _bound(self) -> Bound | None:
        return bound_of(self._backend)

    @property
    def takes_system(self) -> bool:
        """Whether a chat may begin with a system message.

        Raises RequestError for a model without a chat template.
        """
        return self._template(None, False).takes_system

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The ids of a text. Special tokens written in it are recognised.

        add_special_tokens: put the ids first that the model wants before a prompt (most often its
        BOS, or nothing). An end token is never added.
        max_tokens: a text that has more for sure isn't made into tokens, which takes seconds for a
        few megabytes; one that turns out to have more is given as it is.
        Raises RequestError for what isn't a string of valid Unicode, ContextError for a text that
        has more than max_tokens for sure.
        """
        if not isinstance(text, str):
            raise RequestError(f"the text is a {type(text).__name__}; give a string")
        if max_tokens is not None and len(text) > max_tokens and self._bound is not None:
            least = self._bound.tokens_at_least(text)
            if least > max_tokens:
                raise ContextError.of(least, max_tokens, at_least=True)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has {text[error.start]!a} at character {error.start}, half of a "
                "surrogate pair; send valid Unicode"
            ) from error
        # The batch call releases the GIL while it works; the call for one text doesn't.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [*self.prefix_ids, *ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of ids, special tokens left out. Bytes that aren't UTF-8 become U+FFFD.

        Raises RequestError for an id out of range.
        """
        stream = StreamDecoder(self)
        return "".join([stream.feed(operator.index(token)) for token in ids]) + stream.finish()

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes a token stands for; a special token's are its name.

        first: the token opens a text, where some tokenizers drop the space before a word.
        Raises RequestError for an id out of range.
        """
        if (known := self._bytes.get(token_id)) is not None and not first:
            return known
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is out of range; this tokenizer's ids are 0 to "
                f"{self.vocab_size - 1}"
            )
        written = self._backend.id_to_token(token_id)
        if written is None:  # a gap in the vocabulary
            data = b""
        elif token_id in self.special_ids:
            data = written.encode()
        else:
            added = token_id in self._added_ids
            data = self.decoding.token_bytes(written, added=added, first=first)
        if not first:
            self._bytes[token_id] = data
        return data

    @functools.cached_property
    def template_words(self) -> frozenset[str]:
        """What the chat templates mention: see `ChatTemplate.words`. Raises ModelError."""
        return frozenset[str]().union(*(each.words for each in self._templates.values()))

    def template_of(self, *, tools: bool = False) -> ChatTemplate:
        """The template that renders a chat, with or without tools. Raises RequestError."""
        return self._template(None, tools)

    def render_chat(
        self,
        messages: object,
        *,
        tools: object = None,
        documents: object = None,
        add_generation_prompt: bool = True,
        template_name: str | None = None,
        **kwargs: object,
    ) -> str:
        """A conversation as the text the model was trained on.

        messages: mappings with role and content; tools, documents: lists of mappings, or None.
        add_generation_prompt: end with the opening of the assistant's answer.
        template_name: one of `chat_templates`; None takes "tool_use" where there is one and tools
        are given, else "default".
        kwargs: further variables for the template.
        Raises RequestError for what isn't a conversation or what the template refuses, and
        ModelError for a template that isn't valid.
        """
        return self._template(template_name, bool(tools)).render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=kwargs,
        )

    def apply_chat_template(
        self,
        messages: object,
        *,
        tools: object = None,
        documents: object = None,
        add_generation_prompt: bool = True,
        template_name: str | None = None,
        **kwargs: object,
    ) -> list[int]:
        """The ids of `render_chat`'s text, and no BOS but the one its template writes."""
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            template_name=template_name,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def _template(self, name: str | None, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise RequestError("this model has no chat template; give it a plain prompt instead")
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"this model has no chat template {name!r}; it has {', '.join(self._templates)}"
            )
        return self._templates[name]


def _vocab_size(parts: TokenizerParts) -> int:
    """One more than the largest id. Counting is enough, unless the ids have gaps."""
    backend = parts.backend
    n = backend.get_vocab_size(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    if all(token < n for token in added) and (n == 0 or backend.id_to_token(n - 1) is not None):
        return n
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1

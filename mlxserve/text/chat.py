"""Chat templates: messages in, the model's prompt as text out.

A template is a program that comes with a model. It runs in Jinja's immutable sandbox, on plain
copies of the data: it reaches no Python object but strings, numbers, lists and dicts, the sandbox
limits `range` (100,000 steps), and the text it may produce is limited here. Loops inside loops and
huge intermediate strings are not limited, so a hostile template can still waste time and memory:
load models from people you trust.
"""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from mlxserve.errors import ModelError, RequestError
from mlxserve.report import one_line
from mlxserve.text.messages import (
    check_mappings,
    check_messages,
    function_of,
    plain,
    with_arguments,
)

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes

MAX_RENDERED_CHARS = 16 * 1024 * 1024

_PROBE = "one-plain-message"
_PROBE_CALL: dict[str, Any] = {
    "type": "function",
    "id": "a1b2c3d4e",  # Mistral's templates want nine letters and digits
    "function": {"name": "one_plain_call", "arguments": {"key": _PROBE}},
}


class ChatTemplate:
    """One chat template, compiled when it is first used. Safe to share between threads.

    source: the Jinja text. special_tokens: variables such as `bos_token` that it may use.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        documents: object = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. `variables` go to the template as they are, over the special tokens.

        Raises RequestError for data that isn't a conversation or that the template refuses or fails
        on, and ModelError for a template that isn't valid.
        """
        checked = [self._fit_content(self._fit_turn(each)) for each in check_messages(messages)]
        given = {
            "tools": check_mappings("tools", tools),
            "documents": check_mappings("documents", documents),
            "add_generation_prompt": add_generation_prompt,
        }
        extra = {
            name: plain(value, f"chat_template_kwargs.{name}")
            for name, value in (variables or {}).items()
        }
        return self._run({**self._special_tokens, **extra, **given, "messages": checked})

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether a chat may begin with a system message: found by trying one."""
        chat = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hi"}]
        text = self._try([self._fit_content(message) for message in chat])
        return text is not None and _PROBE in text

    def _fit_content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Content in the form this template reads: many take only strings, a few only parts."""
        content = message.get("content")
        takes_text, takes_parts = self._content_forms
        if isinstance(content, list) and not takes_parts:
            return message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and not takes_text:
            return message | {"content": [{"type": "text", "text": content}]}
        return message

    def _fit_turn(self, message: dict[str, Any]) -> dict[str, Any]:
        """An assistant's calls and reasoning in the form that this template reads."""
        calls = message.get("tool_calls")
        if self._reads_thinking and "reasoning_content" in message:
            thinking = {"thinking": message["reasoning_content"]}
            # gpt-oss's template refuses a call with both reasoning and content.
            if not (calls and message.get("content")) or self._takes_thinking(thinking):
                message = message | thinking
        return self._write_calls(message, *self._call_form) if calls else message

    @functools.cached_property
    def _reads_thinking(self) -> bool:
        return "message.thinking" in self._source and "reasoning_content" not in self._source

    def _takes_thinking(self, thinking: dict[str, Any]) -> bool:
        message = {"role": "assistant", "content": _PROBE, "tool_calls": [_PROBE_CALL]}
        turn = self._write_calls(message | thinking, *self._call_form)
        return self._probe(_PROBE, turn) is not None

    @functools.cached_property
    def _call_form(self) -> tuple[bool, dict[str, Any]]:
        """How this template reads calls: found by trying one, in each form that templates want.

        Whether arguments are text instead of an object, and what stands for content that is empty.
        """
        message = {"role": "assistant", "tool_calls": [_PROBE_CALL]}
        function = _PROBE_CALL["function"]
        for as_text in (False, True):
            for empty in ({}, {"content": ""}, {"content": None}):
                text = self._probe(_PROBE, self._write_calls(message, as_text, empty)) or ""
                wrong = str(function["arguments"]) in text or "None" in text
                if function["name"] in text and text.count(_PROBE) > 1 and not wrong:
                    return as_text, empty
        return False, {}

    @staticmethod
    def _write_calls(
        message: dict[str, Any], as_text: bool, empty: dict[str, Any]
    ) -> dict[str, Any]:
        calls = message["tool_calls"]
        if as_text:
            calls = [with_arguments(c, _tojson(function_of(c)["arguments"])) for c in calls]
        content = {"content": message["content"]} if message.get("content") else empty
        rest = {key: value for key, value in message.items() if key != "content"}
        return rest | content | {"tool_calls": calls}

    @functools.cached_property
    def _content_forms(self) -> tuple[bool, bool]:
        """Whether content may be a string, and a list of parts: found by trying one message."""
        as_text = self._probe(_PROBE)
        as_parts = self._probe([{"type": "text", "text": _PROBE}])
        if as_text is not None and _PROBE in as_text:
            return True, as_parts == as_text
        takes_parts = as_parts is not None and _PROBE in as_parts
        return not takes_parts, takes_parts

    def _probe(self, content: object, *more: dict[str, Any]) -> str | None:
        return self._try([{"role": "user", "content": content}, *more])

    def _try(self, messages: list[dict[str, Any]]) -> str | None:
        data = {"tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._run({**self._special_tokens, **data, "messages": messages})
        except RequestError:
            return None

    def _run(self, variables: Mapping[str, object]) -> str:
        from jinja2 import exceptions

        pieces, size = [], 0
        try:
            for piece in self._compiled.generate(variables):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise RequestError(
                        f"the chat is over {MAX_RENDERED_CHARS} characters long; shorten it"
                    )
                pieces.append(piece)
        except (RequestError, ModelError):
            raise
        except exceptions.SecurityError as error:
            raise ModelError(
                f"the chat template does what its sandbox forbids: {one_line(error)}; "
                "use another template"
            ) from error
        except exceptions.TemplateError as error:
            # raise_exception raises the base class itself, with words meant for the user.
            verb = "refuses" if type(error) is exceptions.TemplateError else "fails on"
            raise RequestError(
                f"the chat template {verb} these messages: {one_line(error)}; change them, or give "
                "a plain prompt, which uses no template"
            ) from error
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        return "".join(pieces)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables that it reads, ours and others. Raises ModelError."""
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(self._tree))

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """The names and texts in it, such as keys of messages and roles. Raises ModelError."""
        from jinja2 import nodes

        attributes = {node.attr for node in self._tree.find_all(nodes.Getattr)}
        values = {node.value for node in self._tree.find_all(nodes.Const)}
        return frozenset(attributes | {value for value in values if isinstance(value, str)})

    @functools.cached_property
    def _tree(self) -> "nodes.Template":
        _ = self._compiled  # which says what is wrong with a template that isn't valid
        return _environment().parse(self._source)

    @functools.cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2

        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template has an error on line {error.lineno}: {one_line(error)}; "
                "mend it or use another template"
            ) from error
        except RecursionError as error:
            raise ModelError("the chat template is nested too deeply; use another one") from error


@functools.cache
def _environment() -> "jinja2.Environment":
    """What templates written for Hugging Face's transformers rely on, as its documentation says."""
    # Imported here since it costs more time than the rest of the package together.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; here it only groups."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: object) -> NoReturn:
        raise TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

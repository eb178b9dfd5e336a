"""What every source of a tokenizer delivers, and the tokenizer is made of."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxserve.text.decoding import Decoding

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerParts:
    """A tokenizer, read from a file and checked.

    backend: splits text into ids, special tokens included; it adds none of its own.
    prefix_ids: ids the model wants before a plain prompt, most often its BOS or nothing.
    special_tokens: template variables such as `bos_token`, as text.
    chat_templates: name -> Jinja source; the usual one is called "default".
    """

    backend: "Backend"
    decoding: Decoding
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)

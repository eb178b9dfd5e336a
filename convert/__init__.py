"""Models made smaller: from the Hub, a directory or a GGUF file to what MLX runs.

from mlxserve_convert import convert

made = convert("owner/name", "./name-4bit", bits=4)
print(made.path, made.bits_per_weight)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import Conversion, convert

__all__ = ["Conversion", "convert"]


def __getattr__(name: str) -> Any:
    # As in mlxserve: an import alone loads no MLX.
    if name in __all__:
        from . import conversion

        return getattr(conversion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

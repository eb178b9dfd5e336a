"""What the checks of Metal kernels found, remembered for this machine and these kernels."""

import hashlib
import json
import logging
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from typing import Any

from mlxserve import config, device, files
from mlxserve.kernels.uses import Use

logger = logging.getLogger(__name__)

FILE = "kernel-checks.json"
MAX_REMEMBERED = 200
MAX_FILE_BYTES = 1 << 20
# What a verdict depends on besides the machine: kernels, their sizes, the reference, the check.
CODE = (
    "metal", "attention.py", "norm.py", "pages.py", "quantized.py", "rope.py", "selfcheck.py",
    "verdicts.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, for `rows` rows, or for a row of so many tokens.

    context_tokens: that each of them sees; 0 where they see none.
    """

    rows: int
    context_tokens: int
    kernel_s: float
    reference_s: float

    @property
    def size(self) -> str:
        """A heading for it: rows, and what each sees."""
        return f"{self.rows}x{self.context_tokens}" if self.context_tokens else f"{self.rows}"

    @property
    def faster(self) -> bool:
        return self.kernel_s < self.reference_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """failure: what is wrong with the kernel, or ""; error: the largest, relative to the largest
    output; timings: against the reference. A kernel that failed has neither."""

    failure: str = ""
    error: float | None = None
    timings: tuple[Timing, ...] = ()

    @property
    def faster_at(self) -> int:
        """At how many sizes the kernel is faster than the reference."""
        return sum(timing.faster for timing in self.timings)

    @property
    def mostly_faster(self) -> tuple[bool, str]:
        """Whether it is at most sizes, and that in words."""
        count = len(self.timings)
        return 2 * self.faster_at > count, f"faster at {self.faster_at} of {count} sizes"

    @property
    def faster_up_to(self) -> int:
        """The most rows that were timed, if the kernel is faster at them and at all fewer; or 0."""
        most = 0
        for timing in sorted(self.timings, key=lambda timing: timing.rows):
            if not timing.faster:
                break
            most = timing.rows
        return most

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Verdict":
        """Raises ValueError for anything but what `to_json` gave."""
        try:
            timings = tuple(Timing(**timing) for timing in value["timings"])
            verdict = cls(value["failure"], value["error"], timings)
        except (TypeError, KeyError) as error:
            raise ValueError(f"no verdict: {error!r}") from None
        numbers = [n for t in timings for n in asdict(t).values()]
        numbers += [] if verdict.failure else [verdict.error]
        if not isinstance(verdict.failure, str) or not all(map(_is_number, numbers)):
            raise ValueError(f"no verdict: {value!r:.80}")
        return verdict


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def machine() -> str:
    """Device, system and MLX version, as they are to be reported."""
    gpu = config.metal_stand_in() or device.name()
    return f"{gpu}, {platform.platform()}, MLX {metadata.version('mlx')}"


def recall(use: Use) -> Verdict | None:
    """What was remembered for this use, if machine and kernels are still the same."""
    try:
        return Verdict.from_json(_read()[_key(use)])
    except (KeyError, ValueError):
        return None


def remember(use: Use, verdict: Verdict) -> None:
    """Keep it for the next start. Where the file can't be written, the next start checks again."""
    # Of two processes that do this at once, one is forgotten, and checks again.
    known = {key: value for key, value in _read().items() if key != _key(use)}
    known[_key(use)] = verdict.to_json()
    newest = dict(list(known.items())[-MAX_REMEMBERED:])
    path = config.home() / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps(newest, indent=1).encode())
    except OSError as error:
        logger.warning("%s can't be written (%s): kernels are checked again next time", path, error)


def _read() -> dict[str, Any]:
    """The file's entries; of one that is damaged, none: it is written anew."""
    try:
        with (config.home() / FILE).open("rb") as f:
            found = json.loads(f.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(use: Use) -> str:
    return f"{use.op} {use} | {machine()} | {_code_hash()}"


@cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    root = resources.files("mlxserve.kernels")
    for name in CODE:
        node = root / name
        sources = [node] if node.is_file() else sorted(node.iterdir(), key=lambda file: file.name)
        for file in sources:
            if file.name.endswith((".py", ".metal")):
                digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]

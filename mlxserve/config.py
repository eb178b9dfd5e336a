"""Settings as frozen dataclasses, and the only place that reads the environment.

Environment:
    MLXSERVE_HOME: where models of the catalog are kept (default: $XDG_CACHE_HOME/mlxserve,
        ~/.cache/mlxserve).
    MLXSERVE_DEBUG: 1 prints the traceback of every error (default: off).
    MLXSERVE_KERNELS: for debugging, "reference" computes everything with MLX's own operations;
        "attention=reference,matmul=native" chooses op by op; "attention=metal" or "matmul=metal"
        takes the Metal kernel unchecked (default: see `mlxserve doctor`).
    MLXSERVE_KERNEL_CHECK_S: how many seconds all checks of Metal kernels may take, once per Mac and
        kind of layer, when a model loads (default: 60).
    MLXSERVE_METAL_STAND_IN: for tests, a module whose `run(launch)` plays the GPU of a Mac.
    MLXSERVE_CPU_LEVEL: avx512vnni, avx512, avx2 or portable, for the native CPU kernels (default:
        the best).
    MLXSERVE_CPU_THREADS: threads of the native CPU kernels (default: the cores it may use).
    MLXSERVE_RANK, MLXSERVE_RANKS, MLXSERVE_TENSOR, MLXSERVE_CONTROL, MLXSERVE_CONTROL_KEY,
        MLXSERVE_BACKEND, MLXSERVE_LISTEN_FD, MLXSERVE_READY_FD, MLXSERVE_LAUNCHER_FD: set by
        `mlxserve launch` for the processes that it starts.
    MLXSERVE_PEER_TIMEOUT_S: how many seconds one of these may be silent before it counts as lost
        (default: 10).
    MLXSERVE_API_KEYS: keys of the HTTP server, separated by commas; where others can't see them, as
        they can see a command line (default: none).
    HF_HUB_OFFLINE: 1 downloads nothing, from the Hub or elsewhere (default: off).

huggingface_hub reads its own, which apply to models of the Hub: HF_HOME (their cache), HF_TOKEN,
HF_ENDPOINT and HF_HUB_DOWNLOAD_TIMEOUT are the ones of most use.
"""

import ipaddress
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from mlxserve.errors import RequestError

DEFAULT_MODEL = "smollm2-135m"
CPU_LEVELS = ("avx512vnni", "avx512", "avx2", "portable")
MAX_CPU_THREADS = 256
Policy = Literal["fcfs", "prefix"]
MAX_KERNEL_CHECK_S = 3600
MAX_PEER_TIMEOUT_S = 3600
KV_BITS = (16, 8, 4)
MAX_WAIT_S = 86_400
MIN_KEY_CHARS = 8
MAX_BODY_BYTES = 1 << 30


def home() -> Path:
    """The directory that holds everything mlxserve keeps on disk. Raises RequestError."""
    explicit = os.environ.get("MLXSERVE_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(explicit) if explicit else Path(cache) / "mlxserve"
    try:
        return path.expanduser()
    except RuntimeError:  # in containers, a user may have no name and no home
        raise RequestError(
            f"{path} can't be found, since this user has no home directory; set MLXSERVE_HOME to "
            "a directory"
        ) from None


def offline() -> bool:
    """Whether nothing may be downloaded; Hugging Face's own switch, which people know."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def debug() -> bool:
    """Whether an error is to be shown with its traceback."""
    return os.environ.get("MLXSERVE_DEBUG", "") not in ("", "0")


def kernel_overrides() -> dict[str, str]:
    """Implementations asked for by op; the op "" stands for all others. Raises RequestError."""
    chosen = {}
    for part in filter(None, os.environ.get("MLXSERVE_KERNELS", "").split(",")):
        op, _, name = part.strip().rpartition("=")
        if name not in ("reference", "native", "metal"):
            raise RequestError(
                f"MLXSERVE_KERNELS has {part!r}; write reference, native, metal, or OP=reference, "
                "OP=native, OP=metal"
            )
        chosen[op] = name
    return chosen


def kernel_check_s() -> float:
    """Seconds that checks of Metal kernels may take together. Raises RequestError."""
    return _seconds("MLXSERVE_KERNEL_CHECK_S", "60", MAX_KERNEL_CHECK_S)


def _seconds(name: str, default: str, most: int) -> float:
    text = os.environ.get(name) or default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= most:
        raise RequestError(
            f"{name} is {text!r}; it must be a number of seconds above 0, up to {most}"
        )
    return seconds


def metal_stand_in() -> str | None:
    """The module that plays a Mac's GPU in tests, or None."""
    return os.environ.get("MLXSERVE_METAL_STAND_IN") or None


def cpu_level() -> str | None:
    """The instruction level asked for, or None for the best there is. Raises RequestError."""
    level = os.environ.get("MLXSERVE_CPU_LEVEL") or None
    if level not in (None, *CPU_LEVELS):
        raise RequestError(f"MLXSERVE_CPU_LEVEL is {level!r}; choose {', '.join(CPU_LEVELS)}")
    return level


def cpu_threads() -> int | None:
    """The number of threads asked for, or None for the cores it may use. Raises RequestError."""
    text = os.environ.get("MLXSERVE_CPU_THREADS")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CPU_THREADS:
        raise RequestError(
            f"MLXSERVE_CPU_THREADS is {text!r}; it must be a number from 1 to {MAX_CPU_THREADS}"
        )
    return int(text)


def api_keys() -> list[str]:
    """Keys of the HTTP server."""
    found = os.environ.get("MLXSERVE_API_KEYS", "").split(",")
    return [key.strip() for key in found if key.strip()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """This process among those that compute one model together.

    rank: its number, of `size`; tensor: how many of these share each layer, next to each other; the
    others have other layers, in a pipeline; backend: of `mx.distributed`; control: where rank 0
    listens for the others, and the key that they must know; timeout_s: how long one may be silent,
    start_timeout_s: how long rank 0 waits for all to come; fetch_timeout_s: how long they wait for
    it to listen, which it does once the model is here.
    """

    rank: int
    size: int
    tensor: int
    control: tuple[str, int]
    key: str = field(repr=False)
    backend: str = "ring"
    timeout_s: float = 10.0
    start_timeout_s: float = 120.0
    fetch_timeout_s: float = 86_400.0

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.size % self.tensor:
            raise RequestError(
                f"{self.size} processes can't be divided into stages of {self.tensor}; "
                "--tensor times --pipeline must be their number"
            )

    @property
    def stages(self) -> int:
        return self.size // self.tensor


def placement() -> Placement | None:
    """What `mlxserve launch` told this process; None for one on its own. Raises RequestError."""
    if (rank := os.environ.get("MLXSERVE_RANK")) is None:
        return None
    try:
        host, _, port = os.environ["MLXSERVE_CONTROL"].rpartition(":")
        size = int(os.environ["MLXSERVE_RANKS"])
        told: dict[str, Any] = {
            "rank": int(rank),
            "size": size,
            "tensor": int(os.environ.get("MLXSERVE_TENSOR", size)),
            "control": (host, int(port)),
            "key": os.environ["MLXSERVE_CONTROL_KEY"],
        }
    except (KeyError, ValueError) as error:
        raise RequestError(
            f"MLXSERVE_RANK is {rank!r}, and beside it {error} is missing or wrong; start this "
            "with `mlxserve launch`"
        ) from None
    if size == 1:
        return None
    timeout_s = _seconds("MLXSERVE_PEER_TIMEOUT_S", "10", MAX_PEER_TIMEOUT_S)
    backend = os.environ.get("MLXSERVE_BACKEND", "ring")
    return Placement(**told, backend=backend, timeout_s=timeout_s)


def listen_fd() -> int | None:
    """A socket that the launcher keeps for the server, by its number in this process, or None."""
    return _descriptor("MLXSERVE_LISTEN_FD")


def ready_fd() -> int | None:
    """A pipe that the launcher reads: a byte tells it that the server has begun. Or None."""
    return _descriptor("MLXSERVE_READY_FD")


def launcher_fd() -> int | None:
    """A pipe that the launcher holds as long as it lives, or None."""
    return _descriptor("MLXSERVE_LAUNCHER_FD")


def _descriptor(name: str) -> int | None:
    text = os.environ.get(name)
    if text and not text.isdecimal():
        raise RequestError(f"{name} is {text!r}; only `mlxserve launch` sets it")
    return int(text) if text else None


def kv_bits(value: int | str) -> tuple[int, int]:
    """Bits of a number in the cache, of keys and of values: 16 (not packed), 8 or 4 each.

    value: one number for both, or "KEYS/VALUES", such as "8/4". Raises RequestError.
    """
    if isinstance(value, int | str) and not isinstance(value, bool):
        keys, slash, values = str(value).partition("/")
        values = values if slash else keys
        allowed = {str(bits): bits for bits in KV_BITS}
        if keys in allowed and values in allowed:
            return allowed[keys], allowed[values]
    raise RequestError(
        f"kv_bits is {value!r}; it must be 16, 8 or 4, or two of them for keys and values, such as "
        "8/4"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one engine schedules and how much memory it may take.

    max_batch: rows (requests) computed together in one step.
    max_batched_tokens: tokens computed in one step, over all rows; prompts are cut to it. None asks
        the device: a step should not last much longer than a person waits after Ctrl-C.
    memory_limit_bytes: for weights, cache and activations together; None asks the device.
    kv_bits: 8 or 4 packs the cache's complete pages; "8/4" keys and values apart; 16 keeps them
        in 16 bits where the model computes in 32; None keeps them as they are computed.
    max_kv_size: tokens that a full-attention layer keeps at most: the first `keep`, and the last
        ones; None keeps all.
    prefix_cache: whether prompts that begin alike are computed once.
    max_queue: requests that may wait; more are refused.
    policy: which of a tenant's waiting requests of one priority starts next: "fcfs", in order of
        arrival, or "prefix", the one with most tokens in the cache.
    ageing_s: seconds after which one that waits goes before all that.
    deterministic: an answer must not depend on what else is in its steps; refused where a layer's
        kernel can't promise it.
    target_itl_ms: milliseconds that a step should take at most while answers are under way; prompts
        are cut smaller for it. None cuts them by max_batched_tokens alone.
    trace: a file for what each step spent its time on, for ui.perfetto.dev.
    """

    max_batch: int = 32
    max_batched_tokens: int | None = None
    memory_limit_bytes: int | None = None
    kv_bits: int | str | None = None
    max_kv_size: int | None = None
    keep: int = 0
    prefix_cache: bool = True
    deterministic: bool = False
    max_queue: int = 1024
    policy: Policy = "fcfs"
    ageing_s: float = 10.0
    target_itl_ms: float | None = None
    trace: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.kv_bits is not None:
            kv_bits(self.kv_bits)
        for name in ("prefix_cache", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} is {value!r}; it must be True or False")
        self._check_rotation()
        if self.policy not in get_args(Policy):
            raise RequestError(f"policy is {self.policy!r}; choose fcfs or prefix")
        for name in ("ageing_s", "target_itl_ms"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise RequestError(f"{name} is {value!r}; it must be a finite number above 0")
        for name in ("max_batch", "max_batched_tokens", "memory_limit_bytes", "max_queue"):
            value = getattr(self, name)
            if value is None and name not in ("max_batch", "max_queue"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.max_batched_tokens is not None and self.max_batched_tokens < self.max_batch:
            raise RequestError(
                f"max_batched_tokens ({self.max_batched_tokens}) is smaller than max_batch "
                f"({self.max_batch}); every running request needs one token per step"
            )

    def _check_rotation(self) -> None:
        size, keep = self.max_kv_size, self.keep
        for name, value in (("max_kv_size", size), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise RequestError(f"{name} is {value!r}; it must be a whole number")
        if size is None and keep:
            raise RequestError(f"keep is {keep}, which needs max_kv_size; give both or neither")
        if size is not None and not 0 <= keep < size:
            raise RequestError(
                f"keep is {keep} and max_kv_size {size}; keep must be at least 0 and less than it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What the HTTP server serves, to whom, and how much of it.

    names: under which the model is served; answers have the one that was asked for, or the first.
    sampling: what requests that leave these fields of SamplingParams out are drawn with.
    host, port: where it listens; port 0 takes one that is free.
    allowed_hosts: names in a Host header that are let in, beside the machine's own where it listens
        to this machine only; "*" lets in all.
    cors_origins: web pages of these origins may call it; "*" all.
    api_keys: one of them must come with each request; each is a tenant. None: no key is needed.
    requests_per_minute, tokens_per_minute: of one tenant at the most. Tokens that an answer may
        still take count until it is over.
    strict: refuse fields that nobody knows, rather than name them in a header.
    max_body_bytes, body_timeout_s: of a request's body, whose text takes a hundred times its size
        while it is made into tokens; max_tools: tools in it.
    max_connections: that may be open at once; one more is told 503 and closed.
    header_timeout_s: for a request's head, and for the next one on a connection that is kept.
    send_timeout_s: for a client that stops reading its answer.
    grace_s: how long running answers may go on after SIGTERM.
    tool_format, reasoning_format: how the model writes tool calls and reasoning; None: what its
        chat template shows.
    log_format: a line per request as "text" or "json"; log_prompts: with its prompt.
    """

    names: tuple[str, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8080
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    strict: bool = False
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 60.0
    max_tools: int = 128
    max_connections: int = 2048
    header_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    grace_s: float = 30.0
    tool_format: str | None = None
    reasoning_format: str | None = None
    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise RequestError(f"names is {self.names!r}; the model needs one")
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port is {self.port}; it must be between 0 and 65535")
        limits = ("requests_per_minute", "tokens_per_minute", "max_connections")
        for name in (*limits, "max_body_bytes", "max_tools"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")
        if self.max_body_bytes > MAX_BODY_BYTES:
            raise RequestError(
                f"max_body_bytes is {self.max_body_bytes}; it must be at most {MAX_BODY_BYTES}"
            )
        for name in ("body_timeout_s", "header_timeout_s", "send_timeout_s", "grace_s"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value <= MAX_WAIT_S):
                raise RequestError(
                    f"{name} is {value!r}; it must be above 0 and at most {MAX_WAIT_S}"
                )
        for key in self.api_keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                raise RequestError(
                    f"an API key of {len(key)} characters; it needs at least {MIN_KEY_CHARS}, of "
                    "printable ASCII"
                )

    @property
    def local(self) -> bool:
        """Whether it listens to this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

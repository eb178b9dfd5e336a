"""What compare.py measures with: engines, their processes, the machine, weights as mlx-lm wants."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.compare_report import point_name
from mlxserve.kernels.native import usable_cores

LLAMA_FLAGS = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
GET_MLX_LM = "pip install mlx-lm 'mlx[cpu]==0.32.4' in a venv, and give its --mlx-lm-python"

GOODBYE_S = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """An engine, and what it is spared, being too slow. None: nothing.

    note: in which form it has the weights. get: how to install it. python: the option with its
    interpreter. mlx: how `write_mlx_directory` makes its weights; None: it reads the GGUF file.
    reads: whether it reads a prompt before it decodes, so that this needs no point of its own.
    """

    note: str
    get: str
    python: str | None = None
    mlx: Mapping[str, Any] | None = None
    reads: bool = True
    max_prefill: int | None = None
    max_batch: int | None = None
    max_steps: int | None = None
    max_rounds: int | None = None


SPECS: dict[str, Spec] = {
    "mlxserve": Spec(note="the GGUF file", get="pip install -e . in this repository"),
    "llama.cpp": Spec(
        note="the GGUF file; activations rounded to 8 bits, as it always does",
        get=f'CMAKE_ARGS="{LLAMA_FLAGS}" pip install llama-cpp-python in a venv (AVX-512: see the '
        "script), and give its --llama-python",
        python="llama_python",
    ),
    "mlx-lm": Spec(
        note="the same weights as float32, its fastest form on a CPU; decodes from a cache filled "
        "with random numbers",
        get=GET_MLX_LM,
        python="mlx_lm_python",
        mlx={"packed": False},
        reads=False,
        max_prefill=512,
        max_steps=6,
    ),
    "mlx-lm-4bit": Spec(
        note="the file's quantised weights with scales in bfloat16, as 4-bit checkpoints come",
        get=GET_MLX_LM,
        python="mlx_lm_python",
        mlx={"packed": True, "dtype": "bfloat16"},
        reads=False,
        max_prefill=32,
        max_batch=1,
        max_steps=2,
        max_rounds=1,
    ),
    "mlx-lm-4bit-f32": Spec(
        note="the same with scales in float32, which is the fastest it does from 4 bits",
        get=GET_MLX_LM,
        python="mlx_lm_python",
        mlx={"packed": True, "dtype": "float32"},
        reads=False,
        max_prefill=32,
        max_batch=4,
        max_steps=4,
        max_rounds=1,
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure. context: tokens of each of `batch` prompts."""

    kind: str
    context: int
    batch: int = 1

    @property
    def name(self) -> str:
        return point_name(asdict(self))


def left_out(spec: Spec, point: Point) -> str | None:
    """Why an engine isn't measured at a point, if so."""
    if point.kind == "prefill" and spec.max_prefill and point.context > spec.max_prefill:
        return f"too slow for prompts over {spec.max_prefill} tokens"
    if spec.max_batch and point.batch > spec.max_batch:
        return f"too slow for batches over {spec.max_batch}"
    return None


def prompts(point: Point, vocab_size: int) -> list[list[int]]:
    """The token ids of each row."""
    return [
        random_ids(point.context, vocab_size, f"{point.name}, row {row}")
        for row in range(point.batch)
    ]


class ChildError(Exception):
    """A child answered with an error, died, or took too long; one line."""


class Child:
    """An engine's process. Between requests it can be stopped, so that it takes no CPU at all.

    command: its program and arguments. env: added to this process's own environment. timeout_s:
    for each request. Raises ChildError if the program can't be started.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 600
    ) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._paused = False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **(env or {})},
                text=True,
            )
        except OSError as error:
            self._log.close()
            raise ChildError(f"{command[0]} can't be run: {error.strerror}") from None

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises ChildError."""
        self.resume()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], self._timeout_s)[0]:
                process.kill()
                process.wait()
                raise ChildError(f"no answer within {self._timeout_s:g} s")
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildError(f"the process ended with {process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pause(self) -> None:
        """Stop the process where it is."""
        self._signal(signal.SIGSTOP, True)

    def resume(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT, False)

    def close(self) -> None:
        """Ask the process to end, and see to it."""
        self.resume()
        with contextlib.suppress(subprocess.TimeoutExpired, OSError, ValueError):
            self._process.communicate(json.dumps({"do": "quit"}) + "\n", timeout=GOODBYE_S)
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, which: signal.Signals, paused: bool) -> None:
        if paused != self._paused and self.alive:
            self._process.send_signal(which)
        self._paused = paused

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def new_engine(spec: Spec, points: Sequence[Point], weight_bytes: int) -> dict[str, Any]:
    """An engine's part of the results, still empty."""
    out = {p.name: why for p in points if (why := left_out(spec, p))}
    return {
        "weight_bytes": weight_bytes,
        "kv_itemsize": 4,
        "loads": [],
        "samples": {},
        "failed": {},
        "left_out": out,
    }


def measure(child: Child, spec: Spec, point: Point, ids: list[list[int]], steps: int) -> Any:
    """One measurement: its sample, and for a decode that of reading the prompt, if it was read.

    others: the share of all cores that other processes took meanwhile, where this can be told.
    """
    start, busy = time.perf_counter(), _busy_s()
    if point.kind == "prefill":
        answer = child.ask(do="prefill", prompts=ids)
        s = answer["prefill_s"]
    else:
        steps = min(steps, spec.max_steps or steps)
        answer = child.ask(do="decode", prompts=ids, steps=steps)
        s = median(answer["step_s"])
    cores_s = (time.perf_counter() - start) * (os.cpu_count() or 1)
    others = max(0.0, (_busy_s() - busy - answer["cpu_s"]) / cores_s) if busy else None
    sample = {"s": s, "others": others, **answer}
    read = point.kind == "decode" and answer["prefill_s"] is not None
    return sample, {**sample, "s": answer["prefill_s"], "step_s": []} if read else None


def _busy_s() -> float:
    """CPU seconds of all processes since the machine started; 0 where there is no telling."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
    except OSError:
        return 0.0
    idle = sum(map(int, fields[3:5]))
    return (sum(map(int, fields)) - idle) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Model:
    """A GGUF file. kv_layers: per layer, heads and their size, and its window or None."""

    name: str
    path: Path
    size_bytes: int
    vocab_size: int
    context_tokens: int
    kv_layers: list[tuple[int, int, int | None]]


def find_model(name: str) -> Model:
    """A model of mlxserve's catalogue, fetched if need be, or a `.gguf` file; else ModelError."""
    from mlxserve.models import registry
    from mlxserve.sources.checkpoint import open_checkpoint
    from mlxserve.sources.resolve import resolve

    checkpoint = open_checkpoint(resolve(name))
    model = registry.build(checkpoint.config)
    return Model(
        name=name,
        path=checkpoint.path,
        size_bytes=checkpoint.path.stat().st_size,
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        kv_layers=[(spec.heads, spec.dim, spec.window) for spec in model.layer_specs()],
    )


def write_mlx_directory(gguf: Path, folder: Path, *, packed: bool, dtype: str = "float32") -> int:
    """Write a GGUF file's weights as mlx-lm reads them; the bytes they take.

    packed: quantised as they are in the file; otherwise dense. dtype: of dense tensors and scales,
    and with them of mlx-lm's arithmetic.
    """
    import mlx.core as mx

    from mlxserve.kernels.quantized import PackedWeight, dequantize
    from mlxserve.sources.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(gguf)
    kind: mx.Dtype = getattr(mx, dtype)
    arrays: dict[str, mx.array] = {}
    layers: dict[str, Any] = {}
    for name, value in checkpoint.weights().items():
        if not isinstance(value, PackedWeight):
            arrays[name] = value.astype(kind)
        elif not packed:
            arrays[name] = dequantize(value, kind)
        else:
            layer = name.removesuffix(".weight")
            layers[layer] = {"group_size": value.group_size, "bits": value.bits}
            arrays[name] = value.weight
            arrays[f"{layer}.scales"] = value.scales.astype(kind)
            if value.biases is not None:
                arrays[f"{layer}.biases"] = value.biases.astype(kind)
    config = dict(checkpoint.config)
    if layers:
        config["quantization"] = {"group_size": 32, "bits": 4, **layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return (folder / "model.safetensors").stat().st_size


@contextlib.contextmanager
def weights(model: Model, names: Sequence[str]) -> Iterator[dict[str, tuple[Path, int]]]:
    """What each engine is to load and its bytes; what is written for it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mlxserve-compare-") as scratch:
        paths = {}
        for name in names:
            form = SPECS[name].mlx
            if form is None:
                paths[name] = (model.path, model.size_bytes)
            else:
                folder = Path(scratch) / name
                paths[name] = (folder, write_mlx_directory(model.path, folder, **form))
        yield paths


def read_file_s(path: Path) -> float:
    """Seconds to read a file that is in the page cache already."""
    buffer = bytearray(8 << 20)
    taken = 0.0
    for _ in range(2):  # the first pass brings it there
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        taken = time.perf_counter() - start
    return taken


def machine() -> dict[str, Any]:
    """The processor, as the report names it."""
    facts = {"model name": platform.processor() or platform.machine(), "flags": ""}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in facts:
                facts[key.strip()] = value.strip()
    features = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    return {
        "cpu": facts["model name"],
        "features": [name for name in features if name in facts["flags"].split()],
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def random_ids(count: int, vocab_size: int, seed: str) -> list[int]:
    """The same token ids in every run; prompts of different seeds share no beginning."""
    generator = random.Random(seed)
    return [generator.randrange(min(100, vocab_size // 2), vocab_size) for _ in range(count)]

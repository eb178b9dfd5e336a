"""One engine in a process of its own, told what to measure by lines of JSON. Run by compare.py.

It runs in the engine's own interpreter, so it imports the standard library, NumPy and that engine.
Started with the engine's name; then one object a line on stdin, one answer a line on stdout:

    {"do": "about"}                          {"version": ..., "info": ...} or {"missing": why}
    {"do": "load", "model": path, "threads": n, "id": i}
                                             {"load_s", "first_token_s", "kv_itemsize"}
    {"do": "prefill", "prompts": [[ids]]}    {"prefill_s"}
    {"do": "decode", "prompts": [[ids]], "steps": n}
                                             {"prefill_s", "step_s", "thread_share"}
    {"do": "quit"}                           nothing

`{"error": one line}` where something failed. Times are seconds, sizes bytes. step_s: of each step,
which gives every row a token, all rows being past their prompts. The first step isn't reported.
The last three also have `peak`, the process's largest resident size so far, and `cpu_s`, the CPU
time it took. thread_share: the part of the steps' time in which
the thread that builds them was itself on a core; the arithmetic runs on other threads.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

Prompts = list[list[int]]
Answer = dict[str, Any]


class Engine(Protocol):
    """What the protocol needs of an engine. Making one imports it: ImportError if it isn't here."""

    def about(self) -> Answer:
        """`version`, and in `info` what else a reader should know of this build."""
        ...

    def load(self, model: str, threads: int) -> int:
        """Load, ready to run; returns the bytes of a number in the cache of keys and values."""
        ...

    def prefill(self, prompts: Prompts) -> float:
        """Seconds from the prompts to the first token of each of them."""
        ...

    def decode(self, prompts: Prompts, steps: int) -> Answer:
        """Read the prompts, then decode greedily, never stopping: `prefill_s`, `step_s`,
        `thread_share`; None where an engine can't tell."""
        ...


class Mlxserve:
    """mlxserve as `mlxserve.load` gives it; tokens are timed where the engine hands them over."""

    def __init__(self) -> None:
        import mlxserve

        self._mlxserve = mlxserve
        self._runs = 0

    def about(self) -> Answer:
        import mlx.core as mx

        return {"version": self._mlxserve.__version__, "info": f"mlx {mx.__version__}"}

    def load(self, model: str, threads: int) -> int:
        from mlxserve.cache.storage import Storage

        self._llm = self._mlxserve.load(model)
        # The engine thread keeps its arrays to itself; only their type is looked at here.
        sizes = [o.dtype.size for o in gc.get_objects() if isinstance(o, Storage)]
        return sizes[0] if sizes else 4

    def prefill(self, prompts: Prompts) -> float:
        return self.decode(prompts, 0)["prefill_s"]

    def decode(self, prompts: Prompts, steps: int) -> Answer:
        from mlxserve.types import Request, SamplingParams

        engine: Any = self._llm._engine
        self._runs += 1
        requests = [
            Request(
                id=f"run{self._runs}-{row}",
                prompt_ids=tuple(ids),
                params=SamplingParams(max_tokens=None, ignore_eos=True),
            )
            for row, ids in enumerate(prompts)
        ]
        out: queue.SimpleQueue = queue.SimpleQueue()
        start = time.perf_counter()
        engine.submit(requests, out)
        waiting = {request.id for request in requests}
        while waiting:
            waiting.discard(_token(out))
        prefilled = time.perf_counter()

        def step() -> None:
            for _ in prompts:
                _token(out)

        clock = _thread_clock("mlxserve-engine")
        step_s, share = _timed(step, steps, clock) if steps else ([], None)
        engine.abort([request.id for request in requests])
        ended = 0
        while ended < len(requests):
            ended += out.get().last
        return {"prefill_s": prefilled - start, "step_s": step_s, "thread_share": share}


class LlamaCpp:
    """llama.cpp through the low-level API of llama-cpp-python, its defaults but for threads."""

    N_BATCH = 2048  # llama.cpp's own default

    def __init__(self) -> None:
        import llama_cpp
        import numpy as np

        self._lib: Any = llama_cpp
        self._np = np

    def about(self) -> Answer:
        info = self._lib.llama_print_system_info().decode(errors="replace")
        return {"version": self._lib.__version__, "info": " ".join(info.split())}

    def load(self, model: str, threads: int) -> int:
        lib = self._lib
        lib.llama_backend_init()
        self._threads = threads
        self._model = lib.llama_model_load_from_file(
            model.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {model}")
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        return 2 if lib.llama_context_default_params().type_k == 1 else 4  # 1: ggml's float16

    def prefill(self, prompts: Prompts) -> float:
        return self.decode(prompts, 0)["prefill_s"]

    def decode(self, prompts: Prompts, steps: int) -> Answer:
        lib = self._lib
        context = self._context(len(prompts), max(map(len, prompts)) + steps + 2)
        batch = lib.llama_batch_init(self.N_BATCH, 0, 1)
        try:
            start = time.perf_counter()
            ids = self._read(context, batch, prompts)
            prefill_s = time.perf_counter() - start
            places = [len(prompt) for prompt in prompts]

            def step() -> None:
                rows = [(ids[row], places[row], row, True) for row in range(len(prompts))]
                for row, token in self._run(context, batch, rows):
                    ids[row] = token
                    places[row] += 1

            step_s = _timed(step, steps)[0] if steps else []
            # No share: the calling thread computes along with the others.
            return {"prefill_s": prefill_s, "step_s": step_s, "thread_share": None}
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def _context(self, rows: int, tokens: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = rows * -(-tokens // 256) * 256
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = self._threads
        params.swa_full = False  # as its own programs have it: windows keep what they need
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp can't make a context of {params.n_ctx} tokens")
        return context

    def _read(self, context: Any, batch: Any, prompts: Prompts) -> dict[int, int]:
        """Read whole prompts, N_BATCH tokens at a time; each row's first token."""
        flat = [
            (token, place, row, place == len(ids) - 1)
            for row, ids in enumerate(prompts)
            for place, token in enumerate(ids)
        ]
        first = {}
        for at in range(0, len(flat), self.N_BATCH):
            first |= dict(self._run(context, batch, flat[at : at + self.N_BATCH]))
        return first

    def _run(
        self, context: Any, batch: Any, rows: Sequence[tuple[int, int, int, bool]]
    ) -> Iterator[tuple[int, int]]:
        """Compute (token, place, row, wanted) entries; (row, likeliest next token) where wanted."""
        batch.n_tokens = len(rows)
        for i, (token, place, row, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = place
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
            batch.logits[i] = wanted
        if code := self._lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        for i, (_, _, row, wanted) in enumerate(rows):
            if wanted:
                logits = self._lib.llama_get_logits_ith(context, i)
                values = self._np.ctypeslib.as_array(logits, (self._vocab,))
                yield row, int(values.argmax())


class MlxLm:
    """mlx-lm's model and cache under a loop like its own: one step is built ahead.

    On a CPU it reads prompts so slowly that `decode` fills the cache with random keys and values
    instead; what they are makes no difference to the time of a step.
    """

    def __init__(self) -> None:
        import mlx.core as mx
        import mlx_lm
        from mlx_lm.models import cache
        from mlx_lm.utils import load_model

        self._mx: Any = mx
        self._version, self._cache, self._load = mlx_lm.__version__, cache, load_model

    def about(self) -> Answer:
        return {"version": self._version, "info": f"mlx {self._mx.__version__}"}

    def load(self, model: str, threads: int) -> int:
        self._model: Any = self._load(Path(model))[0]
        # Keys and values are as wide as the norms, whatever the form of the matrices.
        return self._model.model.norm.weight.dtype.size

    def prefill(self, prompts: Prompts) -> float:
        mx = self._mx
        ids = mx.array(prompts)
        cache = self._cache.make_prompt_cache(self._model)
        start = time.perf_counter()
        if ids.shape[1] > 1:
            self._model(ids[:, :-1], cache=cache)
            mx.eval([c.state[:2] for c in cache])
        mx.eval(self._model(ids[:, -1:], cache=cache)[:, -1].argmax(axis=-1))
        return time.perf_counter() - start

    def decode(self, prompts: Prompts, steps: int) -> Answer:
        mx = self._mx
        ids = mx.array([prompt[-1:] for prompt in prompts])
        cache = self._cache.make_prompt_cache(self._model)

        def ahead(token: Any) -> Any:
            following = self._model(token, cache=cache)[:, -1].argmax(axis=-1, keepdims=True)
            mx.async_eval(following)
            return following

        mx.eval(ahead(ids))
        self._fill(cache, len(prompts), len(prompts[0]) - 1)
        under_way = ahead(ids)

        def step() -> None:
            nonlocal under_way
            following = ahead(under_way)
            mx.eval(under_way)
            under_way = following

        step_s, share = _timed(step, steps, time.thread_time)
        mx.eval(under_way)
        return {"prefill_s": None, "step_s": step_s, "thread_share": share}

    def _fill(self, cache: Any, rows: int, tokens: int) -> None:
        if tokens < 1:
            return
        mx = self._mx
        for layer in cache:
            heads, dim = layer.keys.shape[1], layer.keys.shape[3]
            keys, values = mx.random.normal((2, rows, heads, tokens, dim), layer.keys.dtype)
            layer.update_and_fetch(keys, values)
            mx.eval(layer.keys, layer.values)


ENGINES: dict[str, Callable[[], Engine]] = {
    "mlxserve": Mlxserve,
    "llama.cpp": LlamaCpp,
    "mlx-lm": MlxLm,
    "mlx-lm-4bit": MlxLm,
    "mlx-lm-4bit-f32": MlxLm,
}


def serve(make: Callable[[], Engine], requests: IO[str], answers: IO[str]) -> None:
    """Answer requests, one a line, until `quit` or the end of them."""

    def answer(value: Answer) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        engine = make()
    except (ImportError, OSError) as error:  # OSError: a shared library that doesn't load
        requests.readline()
        return answer({"missing": _one_line(error)})
    for line in requests:
        request = json.loads(line)
        if request["do"] == "quit":
            return None
        try:
            answer(_do(engine, request))
        except Exception as error:  # the parent reports it in the table, and goes on
            answer({"error": f"{type(error).__name__}: {_one_line(error)}"})
    return None


def _do(engine: Engine, request: Answer) -> Answer:
    busy = time.process_time()
    match request["do"]:
        case "about":
            return engine.about()
        case "load":
            start = time.perf_counter()
            itemsize = engine.load(request["model"], request["threads"])
            load_s = time.perf_counter() - start
            first_s = engine.prefill([[request["id"]]])
            result = {"load_s": load_s, "first_token_s": first_s, "kv_itemsize": itemsize}
        case "prefill":
            result = {"prefill_s": engine.prefill(request["prompts"])}
        case "decode":
            result = engine.decode(request["prompts"], request["steps"])
        case other:
            raise ValueError(f"unknown request {other!r}")
    return result | {"peak": peak_bytes(), "cpu_s": time.process_time() - busy}


def _timed(
    step: Callable[[], None], steps: int, clock: Callable[[], float] | None = None
) -> tuple[list[float], float | None]:
    """One step to warm up, then the seconds of each, and the clock's part of them."""
    step()
    marks = [time.perf_counter()]
    busy = clock() if clock else 0.0
    for _ in range(steps):
        step()
        marks.append(time.perf_counter())
    share = (clock() - busy) / (marks[-1] - marks[0]) if clock else None
    return [b - a for a, b in itertools.pairwise(marks)], share


def _token(out: queue.SimpleQueue) -> str:
    """Wait for a token; whose it is."""
    got = out.get()
    if got.error is not None:
        raise got.error
    if got.last:
        raise RuntimeError("a row ended before the measurement did; the context is too small")
    return got.request_id


def _thread_clock(name: str) -> Callable[[], float] | None:
    """The CPU time of another thread of this process; None where there is no such clock."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    for thread in threading.enumerate():
        if clock_of is not None and thread.name == name:
            clock = clock_of(thread.ident)
            return lambda: time.clock_gettime(clock)
    return None


def peak_bytes() -> int:
    """The process's largest resident size; getrusage would begin with the parent's on Linux."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(make: Callable[[], Engine]) -> None:
    """Serve on stdin and stdout; whatever an engine prints goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(make, sys.stdin, answers)


if __name__ == "__main__":
    main(ENGINES[sys.argv[1]])

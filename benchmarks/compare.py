"""mlxserve, llama.cpp and mlx-lm on the same weights, in one run: speed, memory, load time.

    python -m benchmarks.compare --quick
    python -m benchmarks.compare --llama-python L/bin/python --mlx-lm-python M/bin/python \\
        --json compare.json --markdown compare.md

Each engine runs in a process of its own, with its own Python, so that each can have the MLX it
wants. An engine that isn't there is named in the report with how to get it. To get them:

    python3 -m venv M && M/bin/pip install mlx-lm 'mlx[cpu]==0.32.4'    # on a Mac just mlx-lm
    python3 -m venv L && CMAKE_ARGS="FLAGS" L/bin/pip install llama-cpp-python    # about 6 minutes

FLAGS matter: without any, on a machine whose own flags the compiler isn't allowed to use, llama.cpp
is plain x86-64 and 6 times slower, which would flatter mlxserve. For a CPU with AVX2 they are

    -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON

and with AVX-512 also

    -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON

What the build has (`llama_print_system_info()`) stands in the report. One without AVX2 isn't
measured; one without AVX-512 on a CPU that has it is, with a warning. Run on an idle machine.

How: every engine gets the same random token ids and decodes greedily, never stopping. One round
loads all of them, then measures each point in one engine after the other while the rest are stopped
(SIGSTOP); the next round begins with new processes and another engine first. Reports give medians.
mlx-lm is far too slow on a CPU for all of that, so what it is spared is listed below the tables.
On a CPU, mlxserve and mlx-lm keep keys and values in float32, llama.cpp in float16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import compare_report as report
from benchmarks.compare_setup import (
    SPECS,
    Child,
    ChildError,
    Model,
    Point,
    find_model,
    machine,
    measure,
    new_engine,
    prompts,
    random_ids,
    read_file_s,
    weights,
)
from mlxserve.engine.footprint import measure_bandwidth
from mlxserve.kernels.native import usable_cores

CHILD = Path(__file__).with_name("compare_child.py")
MODELS = ("smollm2-135m", "gemma3-270m")
SPARE_TOKENS = 8  # a few more steps are computed than are timed


@dataclass(kw_only=True, slots=True)
class Options:
    """What to measure, and with what. env: by engine's --python option, for its processes."""

    models: list[str]
    engines: list[str]
    prefill: list[int]
    contexts: list[int]
    batches: list[int]
    batch_context: int
    steps: int
    rounds: int
    threads: int
    timeout_s: float
    python: dict[str, str] = field(default_factory=dict)
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    json: Path | None = None
    markdown: Path | None = None

    def points(self) -> list[Point]:
        """In the order they are measured and shown; small ones first."""
        found = [Point("prefill", n) for n in self.prefill]
        found += [Point("decode", n) for n in self.contexts]
        found += [Point("decode", self.batch_context, b) for b in self.batches if b > 1]
        return list(dict.fromkeys(found))


FULL = Options(
    models=list(MODELS),
    engines=list(SPECS),
    prefill=[32, 512, 2048],
    contexts=[64, 512, 2048, 7900],
    batches=[4, 8, 16],
    batch_context=64,
    steps=32,
    rounds=3,
    threads=usable_cores(),
    timeout_s=1800,
)
QUICK: dict[str, Any] = {
    "models": list(MODELS[:1]),
    "engines": ["mlxserve", "llama.cpp", "mlx-lm"],
    "prefill": [32],
    "contexts": [64],
    "batches": [4],
    "batch_context": 32,
    "steps": 6,
    "rounds": 1,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(_refuse(message))


def _refuse(message: object) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _numbers(text: str) -> list[int]:
    if not all(v.strip().isdigit() and int(v) > 0 for v in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r} isn't a list of numbers above 0, such as 32,512"
        )
    return [int(v) for v in text.split(",")]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number above 0")
    return int(text)


def _engines(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in SPECS]:
        known = ", ".join(SPECS)
        raise argparse.ArgumentTypeError(f"unknown engine {unknown[0]!r}; there are {known}")
    return names


def _models(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in MODELS and not (name.endswith(".gguf") and Path(name).is_file()):
            raise argparse.ArgumentTypeError(
                f"unknown model {name!r}; there are {', '.join(MODELS)}, and paths of .gguf files"
            )
    return names


def _python(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no interpreter at {text!r}; check the path")
    return text


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=VALUE")
    return name, value


def _output(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} can't be written; check its directory")
    return path


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line; ends the program with one line for what can't be done."""
    parser = _Parser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one model, few points, one round")
    add("--models", type=_models, help=f"default: {','.join(MODELS)}")
    add("--engines", type=_engines, help=f"default: {','.join(SPECS)}")
    add("--llama-python", type=_python, help="the interpreter that has llama-cpp-python")
    add("--llama-env", type=_setting, action="append", metavar="NAME=VALUE")
    add("--mlx-lm-python", type=_python, help="the interpreter that has mlx-lm")
    add("--mlx-lm-env", type=_setting, action="append", metavar="NAME=VALUE")
    add("--prefill", type=_numbers, help="prompt lengths to read")
    add("--contexts", type=_numbers, help="contexts to decode one row at")
    add("--batches", type=_numbers, help="rows to decode together, at --batch-context")
    add("--batch-context", type=_count)
    add("--steps", type=_count, help="decode steps per measurement")
    add("--rounds", type=_count)
    add(
        "--threads",
        type=_count,
        help="of llama.cpp and the bandwidth probe (default: the cores it may use)",
    )
    add("--timeout", type=_count, dest="timeout_s", help="seconds for one measurement")
    add("--json", type=_output, metavar="FILE")
    add("--markdown", type=_output, metavar="FILE", help="the report also goes to stdout")
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    values = asdict(FULL) | (QUICK if given.pop("quick") else {})
    for name in ("llama", "mlx_lm"):
        python = f"{name}_python"
        values["python"] |= {python: given.pop(python)} if python in given else {}
        values["env"][python] = dict(given.pop(f"{name}_env", []))
    return Options(**values | given)


def start(name: str, options: Options) -> Child:
    """The engine's process, not yet loaded. Raises ChildError."""
    option = SPECS[name].python or ""
    command = [options.python.get(option, sys.executable), str(CHILD), name]
    return Child(command, options.env.get(option), options.timeout_s)


def look_up(name: str, options: Options, features: Sequence[str]) -> dict[str, Any]:
    """An engine's part of the report's head: `about` and `note`, or `skipped`; and a `warning`."""
    spec = SPECS[name]
    try:
        with start(name, options) as child:
            about = child.ask(do="about")
    except ChildError as error:
        return {"skipped": f"It doesn't start ({error}). To get it: {spec.get}."}
    if "missing" in about:
        return {"skipped": f"It isn't installed ({about['missing']}). To get it: {spec.get}."}
    found: dict[str, Any] = {"about": about, "note": spec.note}
    if name == "llama.cpp":
        if "avx2" in features and "AVX2 = 1" not in about["info"]:
            return {
                "skipped": "It is built without AVX2, and so several times slower than it can be: "
                f"{about['info']} Build it with {spec.get}."
            }
        if "avx512f" in features and "AVX512 = 1" not in about["info"]:
            found["warning"] = "llama.cpp is built without AVX-512, which this CPU has."
    return found


def start_loaded(
    name: str, path: Path, model: Model, options: Options, engine: dict[str, Any]
) -> Child | None:
    """A child with the model loaded, stopped; None if that failed, which is noted."""
    first = random_ids(1, model.vocab_size, "load")[0]
    child = None
    try:
        child = start(name, options)
        answer = child.ask(do="load", model=str(path), threads=options.threads, id=first)
    except ChildError as error:
        engine["failed"]["load"] = str(error)
        if child is not None:
            child.close()
        return None
    engine["kv_itemsize"] = answer.pop("kv_itemsize")
    engine["loads"].append(answer)
    child.pause()
    return child


def run_round(
    model: Model,
    paths: Mapping[str, Path],
    result: dict[str, Any],
    options: Options,
    number: int,
    say: Callable[[str], None],
) -> None:
    """Load all engines, then measure each point in one after the other; the dead start again."""
    names = [n for n in paths if number < (SPECS[n].max_rounds or options.rounds)]
    names = names[number % len(names) :] + names[: number % len(names)] if names else []
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        for point in [None, *options.points()]:
            for name in names:
                engine = result["engines"][name]
                if "load" in engine["failed"]:
                    continue
                if name not in children or not children[name].alive:
                    if not (child := start_loaded(name, paths[name], model, options, engine)):
                        continue
                    children[name] = stack.enter_context(child)
                if point is not None:
                    _measure_into(engine, name, children[name], point, model, options, say)


def _measure_into(
    engine: dict[str, Any],
    name: str,
    child: Child,
    point: Point,
    model: Model,
    options: Options,
    say: Callable[[str], None],
) -> None:
    spec = SPECS[name]
    by_decode = point.kind == "prefill" and spec.reads and point.context in options.contexts
    if by_decode or point.name in engine["left_out"] or point.name in engine["failed"]:
        return
    ids = prompts(point, model.vocab_size)
    try:
        sample, read = measure(child, spec, point, ids, options.steps)
    except ChildError as error:
        engine["failed"][point.name] = str(error)
        say(f"{name}, {point.name}: {error}")
        return
    child.pause()
    engine["samples"].setdefault(point.name, []).append(sample)
    if read is not None and point.batch == 1:
        engine["samples"].setdefault(Point("prefill", point.context).name, []).append(read)
    say(f"{name}, {point.name}: {report.number(report.rate(engine, asdict(point)))} tok/s")


def run_model(
    model: Model, results: dict[str, Any], options: Options, save: Callable[[], None]
) -> None:
    """All rounds of one model into `results`, saved after each."""
    names = [name for name, engine in results["engines"].items() if "skipped" not in engine]
    points = options.points()
    with weights(model, names) as found:
        result: dict[str, Any] = {
            "name": model.name,
            "file": model.path.name,
            "size_bytes": model.size_bytes,
            "kv_layers": model.kv_layers,
            "read_s": [],
            "points": [asdict(point) for point in points],
            "engines": {n: new_engine(SPECS[n], points, size) for n, (_, size) in found.items()},
        }
        results["models"].append(result)
        paths = {name: path for name, (path, _) in found.items()}
        for number in range(options.rounds):
            head = f"{model.name}, round {number + 1} of {options.rounds}"

            def say(text: str, head: str = head) -> None:
                print(f"{head}: {text}", file=sys.stderr, flush=True)

            results["machine"]["bandwidth"].append(measure_bandwidth(options.threads))
            result["read_s"].append(read_file_s(model.path))
            run_round(model, paths, result, options, number, say)
            save()


def check_contexts(models: Sequence[Model], options: Options) -> str | None:
    """The first model that can't hold what is to be measured, as an error's text."""
    longest = max(p.context for p in options.points()) + options.steps + SPARE_TOKENS
    for model in models:
        if longest > model.context_tokens:
            return (
                f"{model.name} holds {model.context_tokens} tokens, and {longest} are to be "
                "computed; lower --contexts, --prefill or --steps"
            )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 2 if it can't be done."""
    from mlxserve.errors import MlxserveError

    options = parse(arguments)
    try:
        models = [find_model(name) for name in options.models]
    except MlxserveError as error:
        return _refuse(error)
    if (problem := check_contexts(models, options)) is not None:
        return _refuse(problem)
    code, facts = 0, machine()
    engines = {name: look_up(name, options, facts["features"]) for name in options.engines}
    results: dict[str, Any] = {
        "machine": facts | {"threads": options.threads, "bandwidth": []},
        "options": {"rounds": options.rounds, "steps": options.steps},
        "warnings": [e.pop("warning") for e in engines.values() if "warning" in e],
        "engines": engines,
        "models": [],
    }
    print(report.preamble(results), file=sys.stderr, flush=True)

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if options.markdown is not None:
            options.markdown.write_text(report.markdown(results), encoding="utf-8")

    try:
        for model in models:
            run_model(model, results, options, save)
    except KeyboardInterrupt:
        print("stopped; what was measured so far:", file=sys.stderr)
        code = 130
    save()
    print(report.markdown(results))
    return code


if __name__ == "__main__":
    raise SystemExit(main())

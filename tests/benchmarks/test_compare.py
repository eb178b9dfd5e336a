"""The comparison with other engines, without any of them: its maths, its protocol, its refusals."""

import io
import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare, compare_child, compare_report, compare_setup
from benchmarks.compare_setup import SPECS, Child, ChildError, Model, Point, left_out

FAKE = """
import sys
sys.path.insert(0, {folder!r})
import compare_child

class Fake:
    def __init__(self):
        {init}
    def about(self):
        print("noise on stdout")
        return {{"version": "1.0", "info": "AVX2 = {avx2}"}}
    def load(self, model, threads):
        return 2
    def prefill(self, prompts):
        return 0.5 * len(prompts)
    def decode(self, prompts, steps):
        if len(prompts) == 8:
            raise ValueError("too many\\nrows")
        if len(prompts) == 16:
            print("going down", file=sys.stderr)
            sys.exit(3)
        return {{"prefill_s": 0.25, "step_s": [0.1] * steps, "thread_share": 0.5}}

compare_child.main(Fake)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes every child a fake engine; give it what its constructor does and its build flags."""

    def install(init: str = "pass", avx2: int = 1) -> list[str]:
        folder = str(Path(compare_child.__file__).parent)
        script = tmp_path / "fake.py"
        script.write_text(FAKE.format(folder=folder, init=init, avx2=avx2))
        monkeypatch.setattr(compare, "CHILD", script)
        return [sys.executable, str(script)]

    return install


def model(tmp_path: Path) -> Model:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"x" * 1000)
    return Model("tiny", path, 1000, 500, 8192, [(2, 8, None), (2, 8, 100)])


def test_line_through_exact_points():
    line = compare_report.fit_line([64, 512, 2048], [0.01 + 2e-6 * x for x in (64, 512, 2048)])
    assert line is not None
    assert line == pytest.approx((0.01, 2e-6, 0), abs=1e-12)


def test_line_tells_how_far_the_worst_point_is():
    line = compare_report.fit_line([0, 1, 2], [1.0, 2.5, 3.0])
    assert line is not None
    assert (line.a, line.b) == pytest.approx((7 / 6, 1.0))
    assert line.worst == pytest.approx(1 / 6)  # at 0


def test_no_line_through_one_context():
    assert compare_report.fit_line([64, 64], [1.0, 2.0]) is None


def test_bytes_of_keys_and_values_stop_growing_at_a_window():
    layers = [(2, 8, None), (2, 8, 100)]
    assert compare_report.kv_bytes(layers, 50, 4) == 2 * (2 * 2 * 8 * 4 * 50)
    assert compare_report.kv_bytes(layers, 300, 4) == 2 * 2 * 8 * 4 * (300 + 100)


def test_numbers_and_ratios():
    number, ratio = compare_report.number, compare_report.ratio
    assert [number(v) for v in (0.01234, 5.0, 12.34, 1234.5, None)] == [
        "0.0123",
        "5.00",
        "12.3",
        "1234",
        "-",
    ]
    assert number(2.5e9, 1e9) == "2.50"
    assert ratio(30.0, 20.0) == "1.50x"
    assert ratio(30.0, 20.0, less_is_better=True) == "0.67x"
    assert ratio(None, 20.0) == ratio(30.0, None) == ratio(0.0, 1.0) == "-"


def test_protocol_answers_line_by_line():
    class Fake:
        def about(self):
            return {"version": "1", "info": ""}

        def load(self, model, threads):
            return 4

        def prefill(self, prompts):
            return 1.0

        def decode(self, prompts, steps):
            raise RuntimeError("no\nroom")

    asked = [
        {"do": "about"},
        {"do": "load", "model": "m", "threads": 1, "id": 7},
        {"do": "decode", "prompts": [[1]], "steps": 2},
        {"do": "sing"},
        {"do": "quit"},
        {"do": "about"},
    ]
    out = io.StringIO()
    compare_child.serve(Fake, io.StringIO("\n".join(map(json.dumps, asked)) + "\n"), out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert answers[0] == {"version": "1", "info": ""}
    assert (answers[1]["first_token_s"], answers[1]["kv_itemsize"]) == (1.0, 4)
    assert answers[1]["peak"] > 1 << 20
    assert answers[2] == {"error": "RuntimeError: no room"}
    assert answers[3] == {"error": "ValueError: unknown request 'sing'"}
    assert len(answers) == 4


def test_steps_are_timed_without_the_first():
    calls = []
    times, share = compare_child._timed(lambda: calls.append(1), 3, lambda: 0.0)
    assert (len(times), len(calls), share) == (3, 4, 0.0)


def test_a_child_is_asked_paused_and_ended(fake):
    with Child(fake()) as child:
        assert child.ask(do="about")["version"] == "1.0"
        child.pause()
        assert child.ask(do="prefill", prompts=[[1], [2]])["prefill_s"] == 1.0
        with pytest.raises(ChildError, match=r"^ValueError: too many rows$"):
            child.ask(do="decode", prompts=[[1]] * 8, steps=1)
        with pytest.raises(ChildError, match=r"^the process ended with 3: going down$"):
            child.ask(do="decode", prompts=[[1]] * 16, steps=1)
        with pytest.raises(ChildError, match="the process ended with 3"):
            child.ask(do="about")


def test_a_child_that_takes_too_long_is_ended(fake):
    command = fake("import time; time.sleep(30)")
    with (
        Child(command, timeout_s=0.2) as child,
        pytest.raises(ChildError, match="no answer within"),
    ):
        child.ask(do="about")


def test_a_child_gets_its_environment(fake):
    command = fake("import os; raise ImportError(os.environ['WORD'])")
    with Child(command, {"WORD": "hello"}) as child:
        assert child.ask(do="about") == {"missing": "hello"}


def test_a_program_that_is_not_there():
    with pytest.raises(ChildError, match=r"^/nowhere/python can't be run: No such file"):
        Child(["/nowhere/python"])


def test_an_engine_that_is_not_installed_is_skipped_with_how_to_get_it(fake):
    fake("import a_module_that_nobody_has")
    found = compare.look_up("llama.cpp", compare.parse([]), ["avx2"])
    assert found.keys() == {"skipped"}
    assert "No module named 'a_module_that_nobody_has'" in found["skipped"]
    assert "-DGGML_AVX2=ON" in found["skipped"]
    assert "--llama-python" in found["skipped"]


def test_a_llama_cpp_without_avx2_is_refused_where_the_cpu_has_it(fake):
    fake(avx2=0)
    found = compare.look_up("llama.cpp", compare.parse([]), ["avx2"])
    assert "built without AVX2" in found["skipped"]
    assert "about" in compare.look_up("llama.cpp", compare.parse([]), [])


def test_a_llama_cpp_without_avx512_is_measured_with_a_warning(fake):
    fake()
    found = compare.look_up("llama.cpp", compare.parse([]), ["avx2", "avx512f"])
    assert "AVX-512" in found["warning"]


@pytest.mark.full
def test_a_whole_run_with_fake_engines(fake, tmp_path, monkeypatch, capsys):
    fake()
    monkeypatch.setattr(compare, "find_model", lambda name: model(tmp_path))
    monkeypatch.setattr(compare, "measure_bandwidth", lambda threads: 1e9)
    out, text = tmp_path / "out.json", tmp_path / "out.md"
    arguments = (
        "--quick --engines mlxserve,llama.cpp --rounds 2 --contexts 32,64,256 --batches 4,16,8"
    )
    files = ["--json", str(out), "--markdown", str(text)]
    assert compare.main([*arguments.split(), *files]) == 0
    shown = capsys.readouterr().out
    assert shown == text.read_text() + "\n"
    results = json.loads(out.read_text())
    assert compare_report.markdown(results) == text.read_text()
    engine = results["models"][0]["engines"]["mlxserve"]
    assert len(engine["samples"]["decode 32 x4"]) == 2
    assert len(engine["loads"]) == 3  # once more after it went down
    assert len(engine["samples"]["prefill 32"]) == 2  # read on the way to decoding
    assert "| prefill 32, tok/s | 128 | 128 | 1.00x |" in shown
    assert "| decode, context 32, batch 4, tok/s | 40.0 | 40.0 | 1.00x |" in shown
    assert "| decode, context 32, batch 8, tok/s | - | - | - |" in shown
    assert "- llama.cpp, failed (ValueError: too many rows): decode 32 x8." in shown
    assert "- mlxserve, failed (the process ended with 3: going down): decode 32 x16." in shown
    assert "| decode, context 64, batch 1, % | 50.0 | 50.0 |" in shown.split("### Python")[1]


def test_other_processes_are_named_in_the_report():
    def engine(others):
        return {"samples": {"decode 64": [{"s": 1.0, "others": o} for o in others]}}

    busy = compare_report.noise({"engines": {"a": engine([0.0, 0.4]), "b": engine([None])}})
    assert "took up to 40 % of the cores (a, decode 64)" in busy
    assert compare_report.noise({"engines": {"a": engine([0.01, 0.02])}}) == ""


def test_report_without_us_or_with_nothing():
    results = {
        "machine": compare_setup.machine() | {"threads": 1, "bandwidth": [1e9]},
        "options": {"rounds": 1},
        "engines": {"llama.cpp": {"skipped": "It isn't installed. To get it: wait."}},
        "models": [{"name": "m", "file": "m.gguf", "size_bytes": 1e6, "engines": {}}],
    }
    text = compare_report.markdown(results)
    assert "**llama.cpp: skipped.** It isn't installed. To get it: wait." in text
    assert "Nothing was measured." in text


def test_slow_engines_are_spared_and_it_is_said():
    assert left_out(SPECS["mlxserve"], Point("prefill", 2048)) is None
    assert "over 512 tokens" in str(left_out(SPECS["mlx-lm"], Point("prefill", 2048)))
    assert "batches over 1" in str(left_out(SPECS["mlx-lm-4bit"], Point("decode", 64, 4)))


def test_prompts_are_the_same_in_every_run_and_share_no_beginning():
    point = Point("decode", 8, 2)
    first = compare_setup.prompts(point, 49152)
    assert first == compare_setup.prompts(point, 49152)
    assert first[0][0] != first[1][0]
    assert all(0 <= token < 49152 for row in first for token in row)


def test_contexts_that_a_model_cannot_hold_are_refused(tmp_path):
    options = compare.parse(["--contexts", "8190"])
    assert "tiny holds 8192 tokens, and 8230 are" in str(
        compare.check_contexts([model(tmp_path)], options)
    )
    assert compare.check_contexts([model(tmp_path)], compare.parse([])) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engines vllm", "unknown engine 'vllm'; there are mlxserve, llama.cpp, mlx-lm"),
        ("--models gpt-9", "unknown model 'gpt-9'; there are smollm2-135m, gemma3-270m"),
        ("--models gone.gguf", "unknown model 'gone.gguf'"),
        ("--llama-python /nowhere/python", "there is no interpreter at '/nowhere/python'"),
        ("--mlx-lm-python /nowhere/python", "there is no interpreter at '/nowhere/python'"),
        ("--llama-env PATH", "'PATH' isn't NAME=VALUE"),
        ("--prefill 32,x", "'32,x' isn't a list of numbers"),
        ("--steps 0", "'0' isn't a whole number above 0"),
        ("--json /nowhere/out.json", "'/nowhere/out.json' can't be written"),
        ("--fast", "unrecognized arguments: --fast"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        compare.main(arguments.split())
    error = capsys.readouterr().err
    assert refusal.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1

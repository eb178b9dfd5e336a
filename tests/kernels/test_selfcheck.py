"""Metal kernels are used only where they are right and fast: with stand-ins for a GPU, through the
real child process."""

import dataclasses
import importlib
import json
import logging
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata

import mlx.core as mx
import pytest

from mlxserve import files
from mlxserve.errors import ModelError, RequestError
from mlxserve.kernels import attention, native, registry, selfcheck, verdicts
from mlxserve.kernels.registry import TOLERANCE
from mlxserve.kernels.uses import AttentionUse, MatmulUse, NormUse, RopeUse
from mlxserve.kernels.verdicts import Timing, Verdict
from mlxserve.models.load import load_model
from tests.support.tiny import tiny_gemma3, tiny_llama

PLAIN = AttentionUse(2, 1, 64, "bfloat16", window=100)
FULL = AttentionUse(1, 1, 64, "bfloat16")
EVERY_OPTION = AttentionUse(4, 2, 72, "float16", window=100, softcap=5.0, sinks=True)
PACKED = AttentionUse(4, 2, 64, "float16", key_bits=8, value_bits=4)
MATMUL = MatmulUse(96, 128, 4, 64, "bfloat16")
GOOD = Verdict("", 1e-4, (Timing(1, 512, 1e-5, 2e-5),))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """`gpu("slow")` makes this a machine whose GPU is tests/support/stand_ins/slow.py."""

    def choose(name):
        module = f"tests.support.stand_ins.{name}"
        monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", module)
        registry.forget()
        return importlib.import_module(module)

    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLXSERVE_KERNELS", raising=False)
    yield choose
    registry.forget()


@pytest.fixture
def no_check(monkeypatch):
    """From here on a check would be a mistake."""

    def examine(use, *_):
        raise AssertionError(f"checked again: {use}")

    return lambda: monkeypatch.setattr(selfcheck, "examine", examine)


def choose(use, **options):
    (choice,) = registry.choose([use], **options)
    return choice


@pytest.mark.full
@pytest.mark.parametrize("use", [FULL, EVERY_OPTION, PACKED], ids=str)
def test_a_kernel_that_is_right_and_fast_is_used(gpu, caplog, use):
    stand_in = gpu("right")
    assert registry.metal(use) is None  # before it was chosen
    choice = choose(use)
    assert (choice.implementation, choice.failed) == ("metal", False)
    assert choice.reason == "faster at 4 of 4 sizes"
    assert 0 < choice.verdict.error <= TOLERANCE[use.dtype] / 2 * 1.01  # what rounding does
    sizes = [(t.rows, t.context_tokens) for t in choice.verdict.timings]
    assert sizes == [(1, 512), (8, 512), (1, 4096), (8, 4096)]
    assert registry.metal(use) is stand_in.run
    (message,) = caplog.messages
    assert f"checking the Metal attention kernel for {use} on " in message


def test_a_matmul_that_is_right_and_fast_is_used(gpu, caplog):
    stand_in = gpu("right")
    choice = choose(MATMUL)
    assert (choice.implementation, choice.reason) == ("metal", "faster up to 16 rows")
    assert 0 < choice.verdict.error <= TOLERANCE["bfloat16"] / 2 * 1.01
    assert [timing.size for timing in choice.verdict.timings] == ["2", "4", "8", "16"]
    assert registry.metal(MATMUL) is stand_in.run
    (message,) = caplog.messages
    named = "96x128 bfloat16, 4 bits in groups of 64"
    assert f"checking the Metal matmul kernel for {named} on " in message
    registry.forget()
    assert choose(MATMUL) == choice  # remembered
    assert len(caplog.messages) == 1


@pytest.mark.full
def test_a_matmul_that_is_slow_is_used_only_where_rows_must_not_depend_on_their_batch(gpu):
    gpu("slow")
    choice = choose(MATMUL)
    assert (choice.implementation, choice.reason) == ("reference", "slower at 2 rows")
    choice = choose(dataclasses.replace(MATMUL, deterministic=True))
    assert (choice.implementation, choice.reason) == ("metal", "deterministic; slower at 2 rows")


@pytest.mark.full
def test_a_matmul_that_is_wrong_is_used_nowhere(gpu):
    gpu("wrong")
    for use in (MATMUL, dataclasses.replace(MATMUL, deterministic=True)):
        choice = choose(use)
        assert (choice.implementation, choice.failed) == ("reference", True)
        assert "wrong result: matmul is " in choice.reason
        assert registry.metal(use) is None


@pytest.mark.full
def test_a_kernel_that_is_slow_is_not_used(gpu):
    gpu("slow")
    choice = choose(EVERY_OPTION)
    assert (choice.implementation, choice.failed) == ("reference", False)
    assert choice.reason == "faster at 0 of 4 sizes"
    assert registry.metal(EVERY_OPTION) is None


@pytest.mark.full
@pytest.mark.parametrize(("name", "failure"), [
    ("wrong", "wrong result: attention is "),
    ("broken", "RuntimeError: [metal::Device] Unable to build metal library from source program_"),
    ("crashing", "crash: Aborted, signal 6"),
    ("hanging", "hang: no result within 1.5 s"),
])  # fmt: skip
def test_a_bad_kernel_is_reported_once_and_remembered(
    gpu, no_check, monkeypatch, caplog, name, failure
):
    monkeypatch.setenv("MLXSERVE_KERNEL_CHECK_S", "1.5" if name == "hanging" else "60")
    gpu(name)
    first = choose(PLAIN)
    assert (first.implementation, first.failed) == ("reference", True)
    assert first.reason.startswith(f"the Metal kernel failed its check: {failure}")
    assert registry.metal(PLAIN) is None
    _, report = caplog.messages
    assert "off for 2/1/64 bfloat16, window 100, and MLX's own is used" in report
    assert "`mlxserve doctor --kernels`" in report
    assert f"stand_ins.{name}, {platform.platform()}, MLX {metadata.version('mlx')}" in report
    assert failure in report

    no_check()
    registry.forget()  # as the next start does
    assert choose(PLAIN) == first
    assert len(caplog.messages) == 2
    with pytest.raises(AssertionError, match="checked again"):
        choose(PLAIN, afresh=True)


def test_what_a_kernel_prints_is_no_answer(gpu):
    gpu("chatty")
    assert choose(PLAIN).reason == "faster at 4 of 4 sizes"


def test_a_hanging_check_ends_with_the_load_that_wants_it(gpu, monkeypatch):
    """Ctrl-C while a model loads: the process is killed, and nothing is remembered of it."""
    started, popen = [], subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[0]

    monkeypatch.setattr(selfcheck.subprocess, "Popen", start)
    gpu("hanging")
    tiny = tiny_llama(head_dim=64)
    begin = time.monotonic()
    with pytest.raises(ModelError, match="loading was cancelled"):
        load_model(
            tiny.config,
            dict(tiny.weights),
            compute_dtype=mx.bfloat16,
            cancelled=lambda: time.monotonic() > begin + 0.5,
        )
    assert time.monotonic() < begin + 10
    assert started[0].returncode == -signal.SIGKILL
    assert verdicts.recall(AttentionUse(4, 2, 64, "bfloat16")) is None


def test_all_checks_of_a_load_have_one_limit(gpu, monkeypatch):
    """What the first one used up isn't there for the next, which is checked at the next start."""
    monkeypatch.setenv("MLXSERVE_KERNEL_CHECK_S", "1.5")
    gpu("hanging")
    begin = time.monotonic()
    first, second, third = registry.choose([PLAIN, FULL, PACKED])
    assert time.monotonic() < begin + 8
    assert first.reason.endswith("hang: no result within 1.5 s")
    for choice in (second, third):
        assert (choice.implementation, choice.failed) == ("reference", False)
        assert "can't be checked: all checks have 1.5 s" in choice.reason
        assert verdicts.recall(choice.use) is None
    assert verdicts.recall(PLAIN) is not None


def test_a_process_that_ends_as_it_is_killed(gpu, monkeypatch):
    """To signal a group whose last process has just ended isn't allowed, says macOS."""
    kill = selfcheck.os.killpg

    def kill_too_late(group, number):
        kill(group, number)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(selfcheck.os, "killpg", kill_too_late)
    monkeypatch.setenv("MLXSERVE_KERNEL_CHECK_S", "1.5")
    gpu("hanging")
    assert choose(PLAIN).reason.endswith("hang: no result within 1.5 s")


@pytest.mark.parametrize(("setting", "implementation", "reason"), [
    ("reference", "reference", "asked for by MLXSERVE_KERNELS"),
    ("attention=reference", "reference", "asked for by MLXSERVE_KERNELS"),
    ("metal", "metal", "asked for by MLXSERVE_KERNELS, not checked"),
    ("attention=metal", "metal", "asked for by MLXSERVE_KERNELS, not checked"),
])  # fmt: skip
def test_overrides_need_no_check(gpu, no_check, monkeypatch, setting, implementation, reason):
    stand_in = gpu("wrong")
    monkeypatch.setenv("MLXSERVE_KERNELS", setting)
    no_check()
    choice = choose(PLAIN)
    assert (choice.implementation, choice.reason) == (implementation, reason)
    assert registry.metal(PLAIN) is (stand_in.run if implementation == "metal" else None)


@pytest.mark.skipif(platform.system() != "Linux", reason="only on Linux")
def test_native_may_be_asked_for_beside_a_gpu(gpu, no_check, monkeypatch):
    if native.load().module is None:
        pytest.skip("no native kernels were built")
    gpu("right")
    monkeypatch.setenv("MLXSERVE_KERNELS", "attention=native")
    no_check()
    assert choose(PLAIN).implementation == "native"


def test_unsupported_uses_have_the_reference_by_name(gpu, no_check, monkeypatch):
    gpu("right")
    no_check()
    for use, reason in (
        (AttentionUse(4, 2, 48, "float16"), "head dim 48 is none of 64, 72, 80"),
        (AttentionUse(4, 2, 64, "float32"), "a cache in float32 isn't float16 or bfloat16"),
        (AttentionUse(4, 2, 64, "float16", value_bits=8), "keys in 16 bits beside values in 8"),
    ):
        choice = choose(use)
        assert (choice.implementation, choice.failed) == ("reference", False)
        assert choice.reason.startswith(reason)
        monkeypatch.setenv("MLXSERVE_KERNELS", "attention=metal")
        with pytest.raises(RequestError, match=f"asks for metal attention: {reason}"):
            choose(use, afresh=True)
        monkeypatch.delenv("MLXSERVE_KERNELS")


def test_without_python_to_start_nothing_is_remembered(gpu, monkeypatch):
    gpu("right")
    monkeypatch.setattr(sys, "executable", "")
    choice = choose(PLAIN)
    assert choice.implementation == "reference"
    assert "can't be checked: this program doesn't say which Python" in choice.reason
    assert verdicts.recall(PLAIN) is None


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "1e9"])
def test_a_timeout_that_makes_no_sense(gpu, monkeypatch, value):
    gpu("right")
    monkeypatch.setenv("MLXSERVE_KERNEL_CHECK_S", value)
    with pytest.raises(RequestError, match=f"MLXSERVE_KERNEL_CHECK_S is '{value}'"):
        choose(PLAIN)


def test_what_was_found_holds_for_this_machine_and_these_kernels_only(gpu, monkeypatch):
    gpu("right")
    verdicts.remember(PLAIN, GOOD)
    assert verdicts.recall(PLAIN) == GOOD
    assert verdicts.recall(AttentionUse(2, 1, 64, "bfloat16", window=101)) is None
    real = metadata.version
    for target, name, other in (
        (platform, "platform", lambda: "macOS-99.1-arm64"),
        (metadata, "version", lambda name: "9.9.9" if name == "mlx" else real(name)),
        (verdicts, "_code_hash", lambda: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, other)
            assert verdicts.recall(PLAIN) is None
    gpu("slow")
    assert verdicts.recall(PLAIN) is None
    gpu("right")
    assert verdicts.recall(PLAIN) == GOOD


@pytest.mark.parametrize("edit", [
    lambda data: b"",
    lambda data: data[:-20],
    lambda data: b"\xff" + data,
    lambda data: b"[]",
    lambda data: b"[" * 100_000,
    lambda data: data.replace(b'"error": 0.0001', b'"error": "none"'),
    lambda data: data.replace(b'"timings": [', b'"timings": [3,'),
    lambda data: data.replace(b'"failure"', b'"fault"'),
])  # fmt: skip
def test_a_damaged_file_is_ignored_and_written_anew(gpu, tmp_path, edit):
    gpu("right")
    verdicts.remember(PLAIN, GOOD)
    path = tmp_path / "home" / verdicts.FILE
    path.write_bytes(edit(path.read_bytes()))
    assert verdicts.recall(PLAIN) is None
    verdicts.remember(PLAIN, GOOD)
    assert verdicts.recall(PLAIN) == GOOD
    assert [file.name for file in path.parent.iterdir()] == [verdicts.FILE]


def test_the_file_stays_small(gpu, tmp_path, monkeypatch):
    gpu("right")
    monkeypatch.setattr(verdicts, "MAX_REMEMBERED", 3)
    for heads in range(1, 6):
        verdicts.remember(AttentionUse(heads, 1, 64, "float16"), GOOD)
    assert len(json.loads((tmp_path / "home" / verdicts.FILE).read_bytes())) == 3
    assert verdicts.recall(AttentionUse(5, 1, 64, "float16")) == GOOD


def test_a_home_that_cannot_be_written_to_costs_a_warning(gpu, tmp_path, caplog):
    (tmp_path / "home").write_text("a file")
    gpu("right")
    verdicts.remember(PLAIN, GOOD)
    assert "can't be written" in caplog.text
    assert verdicts.recall(PLAIN) is None


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace(path, b"old")

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_models_are_checked_before_their_weights_are_loaded(gpu, caplog, monkeypatch):
    """Once for all layers that are alike; on a CPU only a type of 16 bits asks for it."""
    gpu("right")
    asked = []
    monkeypatch.setattr(selfcheck, "examine", lambda use, *_: asked.append(use) or GOOD)
    tiny = tiny_gemma3(head_dim=64)
    with caplog.at_level(logging.INFO):
        load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.bfloat16)
    windowed = AttentionUse(4, 2, 64, "bfloat16", window=12)
    full = AttentionUse(4, 2, 64, "bfloat16")
    norm, rope = NormUse(64, "bfloat16", inner=True), RopeUse(4, 2, 64, "bfloat16", norms=True)
    chunks = [attention.chunk_use(use) for use in (windowed, full)]
    assert asked == [windowed, chunks[0], full, chunks[1], rope, norm]
    how = "attention is metal (faster at 1 of 1 sizes)"
    assert f"layers 0, 1, 3, {windowed}: {how}" in caplog.messages
    assert f"layers 2, {full}: {how}" in caplog.messages
    assert registry.metal(full) is not None


def test_a_model_that_the_kernel_does_not_fit_says_so_when_it_loads(gpu, no_check, caplog):
    gpu("right")
    no_check()
    tiny = tiny_llama()
    load_model(tiny.config, dict(tiny.weights))
    (message,) = caplog.messages
    assert message.startswith("layers 0, 1, 4/2/16 float32: attention is reference (head dim 16")

"""The trace of steps: a file that Perfetto reads, and that never costs a request."""

import json
import logging
import os
import resource
import tracemalloc
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.engine import trace as trace_module
from mlxserve.engine.trace import Trace
from mlxserve.errors import RequestError


def events(path):
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


@contextmanager
def no_room_beyond(size_bytes):
    """Files can't grow further, as on a full disk: the system refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_step_has_the_fields_that_perfetto_reads(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.span("schedule", 10.0, 10.0005)
    trace.span("device", 10.0005, 10.0105, track="device", tokens=64, rows=3)
    trace.counter("waiting", 10.0105, 7)
    trace.close()
    process, engine, device, *rest = events(path)
    pid = os.getpid()
    named = {"ph": "M", "pid": pid}
    assert process == {**named, "name": "process_name", "tid": 1, "args": {"name": "mlxserve"}}
    assert engine == {**named, "name": "thread_name", "tid": 1, "args": {"name": "engine"}}
    assert device == {**named, "name": "thread_name", "tid": 2, "args": {"name": "device"}}
    span = {"ph": "X", "pid": pid}
    assert rest == [
        {**span, "name": "schedule", "tid": 1, "ts": 10_000_000, "dur": 500, "args": {}},
        {
            **span,
            "name": "device",
            "tid": 2,
            "ts": 10_000_500,
            "dur": 10_000,
            "args": {"tokens": 64, "rows": 3},
        },
        {
            "ph": "C",
            "name": "waiting",
            "pid": pid,
            "tid": 1,
            "ts": 10_010_500,
            "args": {"value": 7},
        },
    ]


@given(times=st.lists(st.floats(0, 1e6), min_size=4, max_size=4))
def test_spans_that_nest_are_written_so(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    outer_start, inner_start, inner_end, outer_end = sorted(times)
    trace = Trace(path)
    trace.span("inner", inner_start, inner_end)
    trace.span("step", outer_start, outer_end)
    trace.close()
    inner, outer = (
        (round(e["ts"] * 1000), round(e["ts"] * 1000) + round(e["dur"] * 1000))
        for e in events(path)[-2:]
    )
    assert outer[0] <= inner[0] <= inner[1] <= outer[1]


def test_names_and_values_are_escaped(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.span('a "name"\n', 0, 1, request="</script>é\u2028")
    trace.close()
    assert events(path)[-1]["name"] == 'a "name"\n'
    assert events(path)[-1]["args"] == {"request": "</script>é\u2028"}


def test_the_file_appears_complete_when_it_is_closed(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("the last one")
    trace = Trace(path)
    trace.span("build", 0, 1)
    assert path.read_text() == "the last one"
    trace.close()
    trace.close()
    trace.span("build", 1, 2)
    assert len(events(path)) == 4
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.full
def test_memory_does_not_grow_with_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    tracemalloc.start()
    try:
        for step in range(20_000):
            trace.span("build", step, step + 1, tokens=step)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    trace.close()
    assert path.stat().st_size > 1_000_000
    assert peak_bytes < 200_000


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "missing" / "trace.json", "No such file or directory"),
        (tmp_path / "file" / "trace.json", "Not a directory"),
        (tmp_path, "it is a folder"),
    ):
        with pytest.raises(RequestError, match=f"a trace can't be written there .{reason}") as e:
            Trace(path)
        assert str(e.value).startswith(f"{path}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_at_the_start(tmp_path):
    with no_room_beyond(0), pytest.raises(RequestError, match="File too large"):
        Trace(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [10_000, 60])
def test_a_disk_that_fills_up_costs_the_trace_and_nothing_else(tmp_path, caplog, steps):
    """Whether a write fails on the way, or only the last one when the file is closed."""
    trace = Trace(tmp_path / "trace.json")
    with no_room_beyond(1000), caplog.at_level(logging.WARNING):
        for step in range(steps):
            trace.span("build", step, step + 1)
        trace.counter("waiting", 1, 1)
        trace.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "trace.json is given up: File too large" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_at_the_end_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "traces"
    folder.mkdir()
    trace = Trace(folder / "trace.json")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    trace.close()
    assert "given up: No such file or directory" in caplog.text


def test_a_trace_that_grows_too_large_is_closed_and_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trace_module, "MAX_BYTES", 10_000)
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for step in range(1000):
        trace.span("build", step, step + 1)
    assert 9_000 < path.stat().st_size < 10_100
    assert len(events(path)) > 50
    assert len(caplog.records) == 1
    trace.close()


def test_times_that_cannot_be_are_refused(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    with pytest.raises(ValueError, match=r"ends at 1.0 s, before its start at 2.0 s"):
        trace.span("build", 2.0, 1.0)
    with pytest.raises(ValueError, match="a time of nan s"):
        trace.counter("waiting", float("nan"), 1)
    with pytest.raises(ValueError, match="a time of inf s"):
        trace.span("build", 0, float("inf"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        trace.counter("waiting", 0, float("nan"))
    trace.close()
    assert len(events(tmp_path / "trace.json")) == 3

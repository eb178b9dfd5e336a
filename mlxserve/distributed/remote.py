"""What launch starts on another machine, through ssh: it says what it has, and becomes a rank.

A line of JSON comes in on stdin, and one goes out; then the orders come, so that nothing of them is
on a command line, where others could see it. The end of stdin is the end of this process, since
whoever started it is gone.
"""

import os
import runpy
import sys
import tempfile
import threading
from io import FileIO

import msgspec

from mlxserve.distributed.addresses import free_ports, is_own
from mlxserve.errors import MlxserveError

MARK = "mlxserve-host: "  # before the answer: a login shell may print things of its own
GONE_EXIT = 3  # as of a rank that has lost another


class Inquiry(msgspec.Struct):
    """What launch asks. ips: that the host should have; model: to look for, "" for none.

    folder: where launch runs, and where to be, if there is such a one here.
    """

    ips: list[str]
    folder: str
    model: str = ""


class Report(msgspec.Struct):
    """What a host has. ports: free ones, one for each address; model: the fingerprint of its files,
    "" where they aren't there. problem: why it can't take part, and fix: what mends that.
    """

    versions: dict[str, str] = {}
    ports: list[int] = []
    model: str = ""
    problem: str = ""
    fix: str = ""


class Orders(msgspec.Struct):
    """What to run: a module of Python, with arguments.

    env: variables to set; files: of variables that name a file, what is in it.
    """

    module: str
    args: list[str]
    env: dict[str, str]
    files: dict[str, str]


def main() -> None:
    """Answer on stdout, and do as told."""
    told = _take_stdin()
    if not (line := told.readline()):
        return
    report = examine(msgspec.json.decode(line, type=Inquiry))
    print(MARK + msgspec.json.encode(report).decode(), flush=True)
    if line := told.readline():
        orders = msgspec.json.decode(line, type=Orders)
        threading.Thread(target=_end_with, args=(told,), daemon=True).start()
        _obey(orders)


def examine(inquiry: Inquiry) -> Report:
    """What this machine has of what a rank needs."""
    if os.path.isdir(inquiry.folder):
        os.chdir(inquiry.folder)
    try:
        from mlxserve.opening import versions
    except Exception as error:  # of MLX, whatever it is
        return Report(problem=f"mlxserve can't be imported: {error}", fix="install it anew there")
    found = versions()
    if strange := [ip for ip in inquiry.ips if not is_own(ip)]:
        problem = f"{', '.join(strange)} isn't an address of this machine"
        return Report(found, problem=problem, fix="correct its ips in the hostfile")
    model = fingerprint_of(inquiry.model) if inquiry.model else ""
    return Report(found, free_ports(inquiry.ips), model)


def fingerprint_of(model: str) -> str:
    """Of a model's files, "" where they aren't here: nothing is downloaded."""
    from mlxserve.sources import fingerprint
    from mlxserve.sources.resolve import find

    try:
        path = find(model)
        return "" if path is None else fingerprint.model(path)
    except (MlxserveError, OSError):
        return ""


def _take_stdin() -> FileIO:
    """Leave an empty one to those who would read it. Unbuffered: no lock that an exit waits for."""
    told = FileIO(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return told


def _end_with(told: FileIO) -> None:
    """On a thread: the main one may be stuck in a collective."""
    told.read()
    os._exit(GONE_EXIT)


def _obey(orders: Orders) -> None:
    os.environ |= orders.env | {name: _as_file(text) for name, text in orders.files.items()}
    sys.argv = [orders.module, *orders.args]
    runpy.run_module(orders.module, run_name="__main__", alter_sys=True)


def _as_file(text: str) -> str:
    """A path of a file without a name, which can't be left behind, however this process ends."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        return f"/dev/fd/{os.dup(file.fileno())}"


if __name__ == "__main__":
    main()

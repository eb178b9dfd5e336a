"""A program called `ssh` that has no network: it runs what it is told on this machine."""

import os
import sys
from pathlib import Path

SCRIPT = """#!{python}
import os, sys, time
options = sys.argv[1:]
host, command = options[options.index("--") + 1 :]
with open({log!r}, "a") as log:
    print(*options, file=log)
what = {hosts!r}.get(host, {{}})
if "hangs" in what:
    time.sleep(600)
if "says" in what:
    print(what["says"], file=sys.stderr)
    sys.exit(255)
os.environ.update(what)
print("Welcome to " + host, flush=True)
os.execvp("sh", ["sh", "-c", "exec " + command])
"""


def fake_ssh(folder: Path, env: dict[str, str], **hosts: dict[str, str]) -> dict[str, str]:
    """`env` with a PATH on which it comes first.

    folder: for the program, and for `log` of its arguments. hosts: by name with `_` for `.`, what
    is special about them: "hangs" never answers, "says" refuses with these words, and others are
    variables that programs there have.
    """
    program = folder / "ssh"
    special = {name.replace("_", "."): what for name, what in hosts.items()}
    program.write_text(SCRIPT.format(python=sys.executable, log=str(folder / "log"), hosts=special))
    program.chmod(0o755)
    return env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"}

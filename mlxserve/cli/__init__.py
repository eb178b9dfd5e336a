"""The command line: one file per command."""

import os
import sys


def main() -> None:
    """Entry point of the `mlxserve` program. Always ends in SystemExit."""
    _open_closed_streams()
    try:
        # Inside the try: Ctrl-C during these imports must not print a traceback either.
        from mlxserve.cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)


def _open_closed_streams() -> None:
    """Give /dev/null to those of stdin, stdout and stderr that were closed (`<&-`, `2>&-`).

    Otherwise Python has None there, and the next file that anyone opens gets a number below 3.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode))

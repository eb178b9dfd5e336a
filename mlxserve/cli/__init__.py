"""The command line: one file per command."""

import sys


def main() -> None:
    """Entry point of the `mlxserve` program. Always ends in SystemExit."""
    try:
        # Inside the try: Ctrl-C during these imports must not print a traceback either.
        from mlxserve.cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)

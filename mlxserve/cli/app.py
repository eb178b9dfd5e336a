"""The program's commands, its options, and what its exit codes mean."""

import io
import signal
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mlxserve import config
from mlxserve.cli import (
    bench,
    cache,
    chat,
    convert,
    doctor,
    generate,
    launch,
    ls,
    plan,
    pull,
    rm,
    serve,
)
from mlxserve.cli.eval import evaluate
from mlxserve.errors import MlxserveError


class _Command(TyperCommand):
    """A command whose --help lists its options under their panels' headings.

    typer does that only with rich, which would double the time that --help takes.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(panel, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


app = typer.Typer(
    name="mlxserve",
    help="Run language models on your own Mac. Linux works too, on the CPU.",
    epilog="Start here:  mlxserve generate --prompt 'Why is the sky blue?'",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=_Command, epilog=generate.EPILOG)(generate.generate)
app.command(cls=_Command, epilog=chat.EPILOG)(chat.chat)
app.command(cls=_Command, epilog=serve.EPILOG)(serve.serve)
app.command(cls=_Command, epilog=launch.EPILOG)(launch.launch)
app.command("eval", cls=_Command)(evaluate)
app.command(cls=_Command, epilog=plan.EPILOG)(plan.plan)
app.command(cls=_Command, epilog=pull.EPILOG)(pull.pull)
app.command(cls=_Command, epilog=convert.EPILOG)(convert.convert)
app.command(cls=_Command)(ls.ls)
app.command(cls=_Command)(rm.rm)
app.command(cls=_Command)(doctor.doctor)
_bench = typer.Typer(rich_markup_mode=None)
_bench.command(cls=_Command)(bench.kernels)
app.add_typer(_bench, name="bench", help=bench.HELP, epilog=bench.EPILOG)
_cache = typer.Typer(rich_markup_mode=None)
_cache.command(cls=_Command)(cache.build)
_cache.command(cls=_Command)(cache.inspect)
_cache.command(cls=_Command)(cache.verify)
_cache.command(cls=_Command)(cache.diff)
app.add_typer(_cache, name="cache", help=cache.HELP, epilog=cache.EPILOG)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"mlxserve {version('mlxserve')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options that come before the command."""


def run() -> int:
    """Run the command in sys.argv and return its exit code.

    0: done. 1: `doctor` or `launch --check` found a problem, `cache verify` damage or `cache diff`
    a difference, or a bug of ours. 2: it can't be done, and one line on stderr says why. 130:
    Ctrl-C. 143: SIGTERM.
    """
    # As an exception, so that the answer ends cleanly and the terminal gets its cursor back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no such letter is no error
    try:
        args = sys.argv[1:] or ["--help"]
        return app(args, prog_name="mlxserve", standalone_mode=False) or 0
    except typer.TyperException as error:  # the command line can't be understood
        return _fail(_sentence(error), 2)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except MlxserveError as error:
        return _fail(str(error), 2)
    except ImportError as error:
        return _fail(f"{error}; `mlxserve doctor` finds out why", 2)
    except OSError as error:
        return _fail(str(error), 2)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        hint = "this is a bug in mlxserve; MLXSERVE_DEBUG=1 shows where"
        return _fail(f"{message}\n{hint}", 1)


def _sentence(error: typer.TyperException) -> str:
    """typer's message as one of ours: a line, with where to look."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)  # only where a command was found
    command = context.command_path if context is not None else "mlxserve"
    return f"{message[:1].lower()}{message[1:]}; `{command} --help` explains"


def _fail(message: str, code: int) -> int:
    if config.debug():
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code

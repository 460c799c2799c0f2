"""The program `gradwire`: its commands, and what an error prints and returns.

Exit codes: 0 all went well; 1 the work began and failed; 2 the input is wrong, and nothing has
begun; 130 interrupted by Ctrl-C; 141 the reader of a pipe has left; 143 ended by SIGTERM. `lab run`
returns the exit code of its command, or 124 after --timeout. docs/reference/command-line.md lists
them for users.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import typer

from gradwire import __version__
from gradwire.errors import ConfigError, GradwireError
from gradwire_tools.cli import looking, measure, options, plans, predict, probing, showing

OK, FAILED, BAD_INPUT, INTERRUPTED, READER_LEFT, TERMINATED = 0, 1, 2, 130, 141, 143

HELP = """Compressed communication for PyTorch training on slow networks.

With --json FILE a command writes one JSON object per line to FILE. With --json - they go to \
standard output, and nothing else does; tables go to standard error then. Progress and remarks \
always go to standard error.

Exit codes: 0 success; 1 the work began and failed; 2 wrong input; 130 interrupted; 141 a pipe's \
reader left; 143 terminated.
"""

app = options.group("", HELP, "doctor --ranks 2", pretty_exceptions_enable=False)
command = partial(options.command, app)
developer = partial(command, rich_help_panel=options.DEVELOPERS)
command("doctor", "--ranks 2 --net 1gbit,1ms")(looking.doctor)
command("demo", "--net 100mbit,1ms")(showing.demo)
app.add_typer(looking.lab, name="lab")
app.add_typer(plans.plan, name="plan")
command("report", "rows.jsonl --output report.html")(showing.report)
app.add_typer(looking.codec, name="codec")
developer("probe", "--ranks 4 --net 200mbit,2ms")(probing.probe)
developer("sim", "--ranks 64 --net 10gbit,50us")(predict.sim)
app.add_typer(measure.bench, name="bench", rich_help_panel=options.DEVELOPERS)

# Of an unknown option, a missing argument, a value of another type. Its name depends on Typer's
# version, which may bring its own copy of click; its place does not.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an error is one line on standard error, never a traceback.

    Args:
        arguments: by default those of this process.
    """
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command line, after it has run."""
    with _sigterm_cleans_up():
        return _run(None if arguments is None else list(arguments))


def _run(given: list[str] | None) -> int:
    try:
        ended: object = app(given, prog_name="gradwire", standalone_mode=False)
        if ended != INTERRUPTED:
            return ended if isinstance(ended, int) else OK
        said, code = "interrupted", INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        said, code = "interrupted", INTERRUPTED
    except _Terminated:
        said, code = "terminated", TERMINATED
    except _UsageError as error:
        said, code = _misused(error), BAD_INPUT
    except ConfigError as error:
        said, code = str(error), BAD_INPUT
    except (GradwireError, OSError) as error:
        said, code = str(error), FAILED
    except SystemExit as error:  # Typer's, where a reader leaves: `codec list --json - | head -1`
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        said, code = "", READER_LEFT
    if said:
        typer.secho(f"gradwire: {said}", err=True, fg="red")
    return code


class _Terminated(BaseException):
    """SIGTERM came. No Exception, so that nothing but cleaning up is done on its way."""


@contextmanager
def _sigterm_cleans_up() -> Iterator[None]:
    """Within, SIGTERM ends ranks and removes temporary files, as Ctrl-C does; once for all.

    A rank of torchrun dies of it at once, as torch may wait for a peer and let no handler run; only
    the main thread may set a handler.
    """
    joins = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    if joins or threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _misused(error: Exception) -> str:
    """What Typer says of the arguments, in a line; without any arguments print the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return ""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    if (told := getattr(error.__context__, "errors", None)) is not None:  # pydantic's
        message = message.replace(": ", f": {told()[0]['input']!r}: ", 1)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "gradwire"
    return f"{message.rstrip('.')}; see {where} --help"

"""The command line: thin commands over the library. `gradwire --help` lists them.

`program` assembles the commands and turns errors into one line and an exit code. `options` reads
what several commands take, `output` writes rows, tables and progress. The commands themselves stand
in `looking` (doctor, codec, lab), `measure` (bench), `predict` (sim) and `showing` (demo, report).
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """See `program.main`, which needs an extra: without it, one line says so."""
    try:
        from gradwire_tools.cli.program import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "click", "rich"):
            raise
        lacks = f"gradwire: the command line needs {error.name}, which is not installed: "
        wanted = 'pip install "gradwire[cli]", or in a clone pip install ".[cli]"'
        print(lacks + wanted, file=sys.stderr)
        sys.exit(2)
    run(arguments)

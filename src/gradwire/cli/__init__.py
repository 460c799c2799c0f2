"""The command line: thin commands over the library. `gradwire --help` lists them.

`program` assembles the commands and turns errors into one line and an exit code. `options` reads
what several commands take, `output` writes rows, tables and progress. The commands themselves stand
in `looking` (doctor, codec, lab), `measure` (bench), `predict` (sim) and `showing` (demo, report).
"""

from gradwire.cli.program import app, main

__all__ = ["app", "main"]

"""The report: one HTML page, or one picture, from the rows of any benchmark.

`page` makes the page, from the `Section`s (parts.py) of each kind of rows: `training` (with
`learning`, `utility`, `steps` and `gains`), `costs`, `errors`, `adapting`, `planning`, `simulation`
and `machine`. `rows` reads and `kinds` checks, `noise` judges differences, `quantities` writes
numbers, and `svg`, `lines`, `bars` and `heat` draw.
"""

from gradwire_tools.report.page import check_packages, picture, render, write

__all__ = ["check_packages", "picture", "render", "write"]

"""The report: one HTML page, or one picture, from the rows of any benchmark.

`page` makes the page, from the `Section`s (parts.py) of each kind of rows: `training` (with
`learning`), `errors`, `costs`, `predictions` and `machine`. `rows` reads and checks,
`gain` judges differences, and `draw` makes pictures of charts with matplotlib, on use.
"""

from gradwire_tools.report.page import check_packages, picture, render, write

__all__ = ["check_packages", "picture", "render", "write"]

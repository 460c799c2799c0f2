"""The report: one HTML page, one picture, or tables in Markdown, from the rows of any benchmark.

`page` makes the page, from the `Section`s (parts.py) of each kind of rows: `training` (with
`learning`), `errors`, `costs`, `predictions` and `machine`. `rows` reads and checks,
`gain` judges differences, and `draw` makes pictures of charts with matplotlib, on use. `tables`
makes tables, and `pages` fills them into README and docs.
"""

from gradwire_tools.report.page import check_packages, picture, render, write
from gradwire_tools.report.tables import table

__all__ = ["check_packages", "picture", "render", "table", "write"]

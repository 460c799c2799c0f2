"""The report: one HTML page, or one picture, from the rows of any benchmark.

`page` makes the page, from `Section`s (parts.py) that one file per kind of rows makes: training,
collectives, kernels, simulation, others. `rows` reads and checks, `noise` judges differences, and
`svg`, `lines` and `bars` draw.
"""

from gradwire.bench.report.page import check_packages, picture, render, write

__all__ = ["check_packages", "picture", "render", "write"]

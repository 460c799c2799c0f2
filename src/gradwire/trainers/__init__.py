"""Trainers of other projects: attach in one line, with gradwire's state in their checkpoints.

Each module imports its trainer's package, so none is imported before `gw.lightning`,
`gw.accelerate`, `gw.transformers`, `gw.ray` or `gw.keras` is used.
"""

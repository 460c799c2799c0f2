"""What surrounds `gradwire`: the command line, the lab, the simulator, benchmarks and their report.

A training script imports none of it.
"""

"""The benchmarks of `gradwire bench`, and their report. Used by the command line alone."""

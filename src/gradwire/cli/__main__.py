"""`python -m gradwire.cli`: the same as the command `gradwire`."""

from gradwire.cli.program import main

main()

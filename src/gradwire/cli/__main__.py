"""`python -m gradwire.cli`: the same as the command `gradwire`."""

from gradwire.cli import main

main()

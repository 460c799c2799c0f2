"""`python -m gradwire_tools.cli`: the same as the command `gradwire`."""

from gradwire_tools.cli import main

main()

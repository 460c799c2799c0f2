"""`python -m gradwire`: the same as the command `gradwire`."""

from gradwire_tools.cli import main  # the one import of the other package

main()

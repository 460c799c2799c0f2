"""What tests use of the insides of three rooms, named here alone.

A test imports what a room's own page exports (`from gradwire.engine import Engine`), and what
stands behind it from here (`from rooms.engine import Core`). So a room that moves what it holds
changes one file of tests. tests/test_house.py checks it.
"""

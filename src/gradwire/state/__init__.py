"""State of handles: a list of sections, and the forms in which it is saved."""

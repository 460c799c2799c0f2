"""What `gradwire bench` measures, and the report made of it. Used by the command line alone."""

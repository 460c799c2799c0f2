"""Back ends: each a table of rules from lowered programs to source text, and nothing else."""

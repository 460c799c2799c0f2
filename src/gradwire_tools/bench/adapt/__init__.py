"""Recorded gradients: what policies and methods save and lose on them."""

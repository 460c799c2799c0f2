"""gradwire: compressed communication for PyTorch training on slow networks."""

__version__ = "0.1.0"

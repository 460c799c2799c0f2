"""C sources as functions: compiled ahead of time (prebuilt, which build makes), or on first use by
the machine's compiler (jit) for its instructions (isa), and kept (cache)."""

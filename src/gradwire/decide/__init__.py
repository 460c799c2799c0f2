"""Decisions that change a handle's plan while training runs, made by all ranks together."""

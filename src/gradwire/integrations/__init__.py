"""Integrations with DDP, FSDP2 and torch.distributed.

This file imports nothing: `import torch` calls backend_entry in the middle of other imports.
"""

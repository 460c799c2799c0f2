"""The drop-in backend: `init_process_group("gradwire")`, and `gw.register`.

This file imports nothing: `import torch` calls `entry` in the middle of other imports.
"""

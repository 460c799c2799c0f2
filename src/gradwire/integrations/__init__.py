"""Where gradwire meets trainers.

Nothing is imported here: `import torch` calls backend_entry, in the middle of other imports.
"""

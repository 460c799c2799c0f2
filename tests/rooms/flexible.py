"""Of `gradwire.flexible`: what its page does not export, and tests use."""

from gradwire.flexible import flexible
from gradwire.flexible.memory_checkpoint import MemoryCheckpoint
from gradwire.flexible.sparse_methods import ALGORITHMS, method_of, selected_from

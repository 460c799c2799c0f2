"""Of `gradwire.integrations`: what its page does not export, and tests use."""

from gradwire.integrations import (
    backend,
    bias,
    flexible,
    formats,
    scatters,
    sharded_attach,
    torch_versions,
    uncompiled,
)
from gradwire.integrations.backend import Group
from gradwire.integrations.backend_entry import autoload
from gradwire.integrations.backend_scope import lacking
from gradwire.integrations.backend_settings import from_environment
from gradwire.integrations.backward import in_backward
from gradwire.integrations.formats import StateGather
from gradwire.integrations.fsdp import Piece
from gradwire.integrations.gather import Gather, Split
from gradwire.integrations.hook import hook_state
from gradwire.integrations.learning import SMALLEST
from gradwire.integrations.memory_checkpoint import MemoryCheckpoint
from gradwire.integrations.metrics import Metrics, Sampler
from gradwire.integrations.payloads import Payloads, _most
from gradwire.integrations.sections import aggregators_section, steps_section
from gradwire.integrations.sparse_methods import ALGORITHMS, method_of, selected_from
from gradwire.integrations.state import Saved, StateSection, members_of
from gradwire.integrations.summary import short
from gradwire.integrations.switch import Switch
from gradwire.integrations.trainers.given import stand_in
from gradwire.integrations.trainers.state import Compression, read, write
from gradwire.integrations.wrapped import original, plain_name, plain_names

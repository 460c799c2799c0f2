"""Of `gradwire.handles`: what its page does not export, and tests use."""

from gradwire.handles import arguments as arguments
from gradwire.handles import bias, sharded_attach, switch, torch_versions, uncompiled
from gradwire.handles import cross_barrier as cross_barrier
from gradwire.handles import handle as handle
from gradwire.handles.awaited import Awaited as Awaited
from gradwire.handles.backward import in_backward
from gradwire.handles.buckets import Buckets as Buckets
from gradwire.handles.coalescing import Coalescing, Split
from gradwire.handles.cross_barrier import LateStep
from gradwire.handles.fsdp import Piece
from gradwire.handles.handle import SMALLEST
from gradwire.handles.hook import hook_state
from gradwire.handles.metrics import Metrics, Sampler
from gradwire.handles.payloads import Payloads, _most
from gradwire.handles.sections import aggregators_section, steps_section
from gradwire.handles.switch import Switch
from gradwire.handles.urgency import Urgency as Urgency
from gradwire.handles.wrapped import original, plain_name, plain_names

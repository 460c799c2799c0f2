"""Of `gradwire.engine`: what its page does not export, and tests use."""

from gradwire.engine import watchdog, workers
from gradwire.engine.core import Action, Core, Do, Place, Run
from gradwire.engine.cuda_streams import StreamFuture
from gradwire.engine.identity import LAYOUTS, MOST_WINDOW, RANGES, TAGS, call_tag, scope_tag
from gradwire.engine.message import ALIGNMENT, Envelope, Headers, align, check, seal
from gradwire.engine.pool import Pools
from gradwire.engine.schedule import Wave, lower
from gradwire.engine.tag_ranges import TagRanges
from gradwire.engine.topology import Topology, numbered
from gradwire.engine.trace import WIRE
from gradwire.engine.watchdog import Watchdog
from gradwire.engine.workers import Workers

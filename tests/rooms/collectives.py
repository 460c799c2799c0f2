"""Of `gradwire.collectives`: what its page does not export, and tests use."""

from gradwire.collectives import job, packing, placement, prepared
from gradwire.collectives.calling import begin, codec_of
from gradwire.collectives.calls import Calls, Step, covered_messages
from gradwire.collectives.compile import Capabilities, Program, compile
from gradwire.collectives.job import Job
from gradwire.collectives.legal import LEGAL, Legal, uncompressed
from gradwire.collectives.operation import OPS, REDUCING, VERBS
from gradwire.collectives.ordered_job import OrderedJob

"""Of `gradwire.outer_loop`: what its page does not export, and tests use."""

from gradwire.outer_loop import fragment as fragment
from gradwire.outer_loop.fragment import Fragment as Fragment
from gradwire.outer_loop.homes import Replica as Replica
from gradwire.outer_loop.homes import fragments_of as fragments_of
from gradwire.outer_loop.meeting import WORD as WORD
from gradwire.outer_loop.meeting import OuterMeeting as OuterMeeting
from gradwire.outer_loop.settings import OuterSettings as OuterSettings
from gradwire.outer_loop.settings import settings_of as settings_of
from gradwire.outer_loop.steps import OuterSteps as OuterSteps

"""Of `gradwire.state`: what its page does not export, and tests use."""

from gradwire.state import formats
from gradwire.state.formats import StateGather
from gradwire.state.state import Saved, StateSection, members_of

"""The control channel: what ranks tell each other beside the data, through their groups' stores."""

from gradwire.control.channel import Channel
from gradwire.control.member import Listener, Member

__all__ = ["Channel", "Listener", "Member"]

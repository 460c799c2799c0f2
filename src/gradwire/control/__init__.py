"""The control channel: what ranks tell each other beside the data, through their groups' stores.

A process has one `Channel`: a control thread, which calls listeners and ends futures, and a thread
for each store server, which alone speaks to it. From the bottom up: `space` (keys), `journal` (a
list that grows), `host` (where a store lives, and whether), `connection` (the thread), `entrance`
(which incarnation of a group), `rounds` (exchanges and agreements), `participant` (a rank's part in
a group), `member` and `channel` (what others call). docs/internals/control.md has the protocol, its
keys, what it costs, and why it is so.
"""

from gradwire.control.channel import Channel
from gradwire.control.description import digest
from gradwire.control.member import Listener, Member

__all__ = ["Channel", "Listener", "Member", "digest"]

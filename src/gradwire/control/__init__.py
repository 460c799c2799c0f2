"""The control channel: messages between ranks beside the data, through their groups' stores.

A process has one `Channel`: a control thread, which calls listeners and completes futures, and one
thread per store server, which makes all operations on that server. The modules, from the bottom up:
`namespace` (keys), `journal` (an append-only list), `connection` (a store server and its thread),
`rendezvous` (the incarnation of a group), `meetings` (exchanges and agreements), `member`,
`channel` and `ranks` (the interface).
docs/internals/control.md has the protocol, its keys, its cost, and its reasons.
"""

from gradwire.control.channel import Channel
from gradwire.control.description import digest
from gradwire.control.member import Listener, Member
from gradwire.control.ranks import PendingResult, Ranks

__all__ = ["Channel", "Listener", "Member", "PendingResult", "Ranks", "digest"]

"""The control channel: messages between ranks beside the data, through their groups' stores.

A process has one `Channel`: a control thread, which calls listeners and completes futures, and one
thread per store server, which makes all operations on that server. The modules, from the bottom up:
`keys` (of a store, and journals in it), `connection` (a store server and its thread), `participant`
(a rank's place in its group, and its meetings: exchanges and agreements), `channel` (its threads,
and memberships in groups) and `ranks` (the interface).
docs/internals/control.md has the protocol, its keys, its cost, and its reasons.
"""

from gradwire.control.channel import Channel, Member
from gradwire.control.description import digest
from gradwire.control.ranks import PendingResult, Ranks

__all__ = ["Channel", "Member", "PendingResult", "Ranks", "digest"]

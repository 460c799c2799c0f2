"""Of `gradwire.trainers`: what its page does not export, and tests use."""

from gradwire.trainers.given import stand_in
from gradwire.trainers.state import Compression, read, write

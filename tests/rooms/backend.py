"""Of `gradwire.backend`: what its page does not export, and tests use."""

from gradwire.backend import group as backend
from gradwire.backend.entry import autoload
from gradwire.backend.group import Group
from gradwire.backend.models import lacking
from gradwire.backend.settings import from_environment

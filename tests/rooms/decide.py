"""Of `gradwire.decide`: what its page does not export, and tests use."""

from gradwire.controllers.replan import CHECKS
from gradwire.controllers.targets import policy_of, targets_of
from gradwire.decide import auto, scripts, tables
from gradwire.decide.auto import Automatic, worth
from gradwire.decide.policy import Adaptation
from gradwire.decide.scripts import (
    UNTIMED,
    Make,
    NextWindow,
    Pass,
    Passes,
    Runner,
    Script,
    Tell,
    Use,
    tried,
)
from gradwire.decide.tables import Decider, DecidingRank
from gradwire.decide.weighing import MOST, priorities, together

"""`gw.Flexible`: the density and the collective of top-k follow training and network."""

from gradwire.flexible.triggers import Triggers as Triggers

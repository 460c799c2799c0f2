"""The list of codecs: a new one is a file, and here its class and its name.

`gradwire` and `gradwire.codecs` offer all public names of this module.
"""

from __future__ import annotations

from typing import Any

from gradwire.codecs.adacomp import AdaComp as AdaComp
from gradwire.codecs.cast import Cast as Cast
from gradwire.codecs.dgc import DGC as DGC
from gradwire.codecs.float8 import Float8 as Float8
from gradwire.codecs.graddrop import GradDrop as GradDrop
from gradwire.codecs.hardthreshold import HardThreshold as HardThreshold
from gradwire.codecs.identity import Identity as Identity
from gradwire.codecs.learnedlevels import LearnedLevels as LearnedLevels
from gradwire.codecs.lowrank import LowRank as LowRank
from gradwire.codecs.mstopk import MSTopK as MSTopK
from gradwire.codecs.onebit import OneBit as OneBit
from gradwire.codecs.qsgd import QSGD as QSGD
from gradwire.codecs.randomk import RandomK as RandomK
from gradwire.codecs.randomshift import RandomShift as RandomShift
from gradwire.codecs.rotated import Rotated as Rotated
from gradwire.codecs.saturating import Saturating as Saturating
from gradwire.codecs.tbq import TBQ as TBQ
from gradwire.codecs.terngrad import TernGrad as TernGrad
from gradwire.codecs.threelc import ThreeLC as ThreeLC
from gradwire.codecs.topk import TopK as TopK
from gradwire.lang.codec import Codec

# `codecs.REGISTRY`: name -> (class, options fixed by the name)
_REGISTRY: dict[str, tuple[type[Codec], dict[str, Any]]] = {
    "identity": (Identity, {}),
    "fp16": (Cast, {"dtype": "fp16"}),
    "bf16": (Cast, {"dtype": "bf16"}),
    "fp8": (Float8, {}),
    "qsgd": (QSGD, {}),
    "terngrad": (TernGrad, {}),
    "onebit": (OneBit, {}),
    "tbq": (TBQ, {}),
    "threelc": (ThreeLC, {}),
    "topk": (TopK, {}),
    "mstopk": (MSTopK, {}),
    "dgc": (DGC, {}),
    "graddrop": (GradDrop, {}),
    "hardthreshold": (HardThreshold, {}),
    "adacomp": (AdaComp, {}),
    "randomk": (RandomK, {}),
    "randomshift": (RandomShift, {}),
    "learnedlevels": (LearnedLevels, {}),
    "rotated": (Rotated, {}),
    "saturating": (Saturating, {}),
    "lowrank": (LowRank, {}),
}

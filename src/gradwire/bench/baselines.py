"""The names of the baseline methods.

16 bits are the baseline for time: they cost almost no accuracy, so a codec that beats only 32 bits
gains nothing (Beyond Throughput, 2.2). 32 bits are the baseline for the loss.
"""

from __future__ import annotations

FULL = "torch-fp32"
SIXTEEN_BIT = "torch-fp16-hook"
SIXTEEN_BITS = (SIXTEEN_BIT, "torch-bf16-hook")  # the better one is the bar for utility

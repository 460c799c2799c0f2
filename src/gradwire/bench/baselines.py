"""The methods that others are held against, by name.

Sixteen bits are the baseline for time: they cost next to no accuracy, so a codec that beats only
32 bits has won nothing (Beyond Throughput, 2.2). Thirty-two bits are the baseline for the loss.
"""

from __future__ import annotations

FULL = "torch-fp32"
SIXTEEN_BIT = "torch-fp16-hook"

"""Chunks of a vector: which are largest, and how they are taken out of it and put back.

A vector of n values has ceil(n / size) chunks of `size` values; the last may be shorter, and is
padded with zeros where it is taken out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def largest_chunks(sizes: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Per parameter, the indices of its `count` largest chunks, ascending, int64.

    Ties go to the lower index, and what is not finite is largest. So equal sizes give equal indices
    on all ranks.

    Args:
        sizes: bf16[chunks] per parameter, not negative.
        counts: per parameter.
    """
    alike: dict[tuple[int, int], list[int]] = {}  # (chunks, count) -> parameters
    for at, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        alike.setdefault((size.numel(), count), []).append(at)
    found = list(sizes)
    for (chunks, count), places in alike.items():
        index = torch.arange(chunks, dtype=torch.int64, device=sizes[0].device)
        if count == chunks:
            top = index.expand(len(places), chunks)
        else:  # bits of floats that are not negative are in the order of the floats
            bits = torch.stack([sizes[at] for at in places]).view(torch.int16).long() & 0x7FFF
            keys = (bits << 32) - index  # no two are equal
            top = keys.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
        for at, indices in zip(places, top, strict=True):
            found[at] = indices
    return found


def gather_chunks(values: torch.Tensor, at: torch.Tensor, into: torch.Tensor) -> None:
    """Write the chunks `at` (ascending indices) of `values` to the rows of `into` [count, size]."""
    whole, last = _cut(values, into.shape[1])
    if len(whole):
        torch.index_select(whole, 0, at.clamp(max=len(whole) - 1), out=into)
    if len(last):
        padded = torch.nn.functional.pad(last, (0, into.shape[1] - len(last)))
        into[-1] = torch.where(at[-1] == len(whole), padded, into[-1])


def scatter_chunks(rows: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows [count, size] to the chunks `at` (ascending indices) of `values`; the padding of
    the last chunk is dropped."""
    whole, last = _cut(values, rows.shape[1])
    if not len(last):
        whole.index_copy_(0, at, rows)
        return
    if len(whole):
        whole.index_copy_(0, at[:-1], rows[:-1])
        end = at[-1:].clamp(max=len(whole) - 1)
        whole.index_copy_(0, end, torch.where(at[-1] == end, rows[-1:], whole[end]))
    last.copy_(torch.where(at[-1] == len(whole), rows[-1, : len(last)], last))


def _cut(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the whole chunks, [chunks, size]; the shorter last one, or an empty vector)."""
    whole = values.numel() // size
    return values[: whole * size].view(whole, size), values[whole * size :]

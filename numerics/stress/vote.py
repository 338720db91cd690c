"""Elect golden digests by majority, and find the odd ones among devices, ranks and machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Election:
    """golden: the digest of more than half of the votes; None where there is none. odd: voters with another digest."""

    golden: int | None
    odd: tuple[str, ...] = ()


def elect(votes: Mapping[str, Sequence[int]]) -> Election:
    """Elect among voters. votes: the digests that each voter found, in the order of its repetitions.

    A voter has one vote, the digest of more than half of its repetitions. Of one voter alone, this is golden.
    A voter without such a digest has no vote and is odd where the others agree.
    """
    opinions = {name: _majority(digests) for name, digests in votes.items()}
    golden = _majority([value for value in opinions.values() if value is not None])
    if golden is None:
        return Election(None)
    return Election(golden, tuple(name for name, value in opinions.items() if value != golden))


def _majority(digests: Sequence[int]) -> int | None:
    counts = Counter(digests).most_common(1)
    return counts[0][0] if counts and 2 * counts[0][1] > len(digests) else None

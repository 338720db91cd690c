"""Memory patterns: write, read back, and keep every bit that was ever wrong. The result of a sound memory is zero.

walking ones            element i is 1 << ((i + shift) mod 64), for eight shifts, and its inverse
address in address      element i is i, then the inverse
moving inversions       a pattern everywhere; check and write its inverse, forwards, then backwards
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHIFTS = (0, 1, 2, 3, 8, 21, 34, 55)
SEEDS = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F, 0x0123456789ABCDEF)


def walking_ones(buffer: Tensor) -> Tensor:
    """buffer: int64 (n,). Returns the wrong bits of each element, int64 (n,)."""
    wrong = torch.zeros_like(buffer)
    for shift in SHIFTS:
        expected = _walking(buffer, shift)
        buffer.copy_(expected)
        wrong |= buffer ^ expected
        buffer.bitwise_not_()
        wrong |= buffer ^ expected.bitwise_not_()
    return wrong


def _walking(buffer: Tensor, shift: int) -> Tensor:
    positions = torch.arange(shift, shift + len(buffer), device=buffer.device)
    return torch.ones_like(buffer) << (positions & 63)


def address_in_address(buffer: Tensor) -> Tensor:
    """buffer: int64 (n,). Returns the wrong bits of each element, int64 (n,)."""
    expected = torch.arange(len(buffer), device=buffer.device)
    buffer.copy_(expected)
    wrong = buffer ^ expected
    buffer.bitwise_not_()
    wrong |= buffer ^ expected.bitwise_not_()
    return wrong


def moving_inversions(buffer: Tensor) -> Tensor:
    """buffer: int64 (n,). Returns the wrong bits of each element, int64 (n,)."""
    wrong = torch.zeros_like(buffer)
    parts = list(zip(buffer.chunk(8), wrong.chunk(8), strict=True))
    for pattern in SEEDS:
        buffer.fill_(pattern)
        for value, order in ((pattern, parts), (~pattern, parts[::-1])):
            for part, bad in order:
                bad |= part ^ value
                part.bitwise_not_()
        wrong |= buffer ^ pattern
    return wrong


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "walking ones": walking_ones,
    "address in address": address_in_address,
    "moving inversions": moving_inversions,
}

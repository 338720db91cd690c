"""Loss parity: when two loss curves count as equal, and whether those of our step and the plain one are."""

import dataclasses
from typing import Any

import pytest
import torch

from bench.suites import loss_parity
from bench.suites.loss_parity import TrainingShape, compare, row_of, train_both, verdict

TINY = TrainingShape("tiny", 1, 2, 16, 16, 2, 4, 20, 1e-3)


def rows_of(ours: list[float], plain: list[float]) -> list[dict[str, Any]]:
    """Rows of flat curves that end where these say, one of each a seed."""
    return [
        row_of(seed, [one] * 20, [two] * 20) for seed, (one, two) in enumerate(zip(ours, plain, strict=True))
    ]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ([4.0, 4.1, 4.2], True),  # the same
        ([4.001, 4.099, 4.2], True),
        ([4.3, 4.4, 4.5], False),  # surely another loss
        ([4.05, 4.15, 4.25], True),  # different, by half of the spread between seeds
        ([4.3, 3.9, 4.1], False),  # zero on average, with an interval too wide for "equal"
    ],
)
def test_curves_are_equal_only_where_the_whole_interval_is_within_the_margin(
    other: list[float], equal: bool
) -> None:
    found = compare(rows_of([4.0, 4.1, 4.2], other))
    assert found.equal is equal
    assert ("NOT shown" in verdict(found)) is not equal


def test_ours_and_the_plain_step_have_equal_losses_from_the_same_weights_and_batches(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two micro-batches a step, clipping and weight decay: the losses part only as rounding grows."""
    monkeypatch.setattr("runtime.attention_kernels.cpu_threads", lambda _: 1)
    monkeypatch.setattr(loss_parity, "embedded_tokens", lambda: torch.arange(1000) % 97)
    ours, plain = train_both(TINY, 0)
    assert len(ours) == TINY.steps
    assert ours[0] == pytest.approx(plain[0], rel=1e-6)
    assert ours == pytest.approx(plain, rel=1e-4)
    assert ours[-1] < ours[0] - 0.05  # it learned something
    faster = dataclasses.replace(TINY, learning_rate=2e-3)
    other, _ = train_both(faster, 0)
    assert other != pytest.approx(plain, rel=1e-4)

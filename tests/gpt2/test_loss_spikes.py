"""Loss spikes are found against a robust running scale, and a noisy but ordinary curve has none."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.watch import SpikeDetector
from referee.numerics.diagnose.spikes import WINDOW


def curve(seed: int, steps: int, noise: float) -> list[float]:
    """A loss that falls from 11 to 3 as losses do, with normal noise."""
    generator = random.Random(seed)
    return [3 + 8 * math.exp(-k / 60) + generator.gauss(0, noise) for k in range(steps)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.3))
def test_a_falling_loss_has_no_spike(seed: int, noise: float) -> None:
    watch = SpikeDetector()
    assert [watch.observe(loss) for loss in curve(seed, 400, noise)] == [None] * 400


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), where=st.integers(150, 390), height=st.floats(3.0, 1e6))
def test_only_a_loss_far_above_the_others_is_a_spike(seed: int, where: int, height: float) -> None:
    losses = curve(seed, 400, 0.05)
    losses[where] += height
    watch = SpikeDetector()
    found = [k for k, loss in enumerate(losses) if watch.observe(loss) is not None]
    assert found == [where]


def test_resumed_detection_equals_uninterrupted_detection() -> None:
    losses = curve(3, 300, 0.1)
    losses[200] += 5
    whole, first = SpikeDetector(), SpikeDetector()
    expected = [whole.observe(loss) for loss in losses]
    observed = [first.observe(loss) for loss in losses[:170]]
    second = SpikeDetector(first.losses)
    assert observed + [second.observe(loss) for loss in losses[170:]] == expected
    assert len(second.losses) == WINDOW


def test_the_note_of_a_run_has_the_spikes_after_its_warm_up_alone() -> None:
    detector = SpikeDetector(spikes=[[20, 9.0, 5.0], [90, 4.0, 3.0]])
    assert detector.summary(90) is None
    assert "1; the largest at iteration 90" in (detector.summary(20) or "")

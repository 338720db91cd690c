"""Time steps of the standard GPT-2, B and RALEARN on a card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.card_checks import DIFFERS, NOT_RUN, CardCheck, CheckedDevice, NotRunError, judge
from bench.card_studies import UNDISTURBED, read_plan
from bench.cases import BASELINE, LEARNED, PLAIN, SHAPES, Shape
from bench.runner import BenchError, measure_case
from runtime.batch_plan import largest_micro_batch

SMALL = Shape("2x64-t64", 2, 2, 64, 64, plain_micro=8)
SECONDS = {False: 4.0, True: 0.2}  # of timed steps of a case
# tokens/s of B at 124M, T = 1024, micro-batch 64, computed without a card
ESTIMATES = {"h200": (450_000, 510_000)}
Samples = dict[tuple[str, int], dict[str, Any]]


def speed_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Time each case in a new worker, then compare them. The goals are for a GPU."""
    shape = SMALL if card.on_cpu else SHAPES["card"][0]
    micro = shape.plain_micro if card.on_cpu else planned_micro(card, shape)
    samples: Samples = {}
    cases = ((PLAIN, shape.plain_micro), (PLAIN, micro), (BASELINE, micro), (LEARNED, micro))
    for case in dict.fromkeys(cases):
        name = f"speed: {case[0]}, {shape.name}, micro-batch {case[1]}"
        try:
            samples[case] = measure_case(shape, *case, SECONDS[card.on_cpu])
        except BenchError as error:
            too_large = case[0] == PLAIN and "out of memory" in f"{error}".lower()
            yield CardCheck(name, "tokens/s", f"{error}", NOT_RUN if too_large else DIFFERS)
            continue
        yield case_check(card, name, case, samples[case])
    yield from goal_checks(card, shape, micro, samples)


def planned_micro(card: CheckedDevice, shape: Shape) -> int:
    """Return the study's micro-batch, or the next smaller one that divides the effective batch of the shape.

    Without a study, the largest of the bench.
    """
    try:
        limit = read_plan(card, UNDISTURBED).batch.micro
    except NotRunError:
        limit = max(micro for _, micro in shape.cases)
    return largest_micro_batch(shape.effective, 1, limit)


def case_check(card: CheckedDevice, name: str, case: tuple[str, int], sample: dict[str, Any]) -> CardCheck:
    """Compare B with the estimate for the card. Other cases pass where they have a speed."""
    speed, peak = sample["tokens_per_second"], card.resolved.target.peak_flops
    measured = f"{speed:,.0f} tokens/s" + (
        f", MFU {speed * sample['flops_per_token'] / peak:.3f}" if peak else ""
    )
    measured += "" if card.on_cpu else f", peak {sample['peak_bytes'] / 2**30:.2f} GiB"
    estimate = ESTIMATES.get(card.resolved.target.name)
    if estimate and case == (BASELINE, 64):
        low, high = estimate
        return judge(name, f"{low:,} to {high:,} tokens/s or more (estimated)", measured, speed >= low)
    return judge(name, "tokens/s (no estimate)", measured, speed > 0)


def goal_checks(card: CheckedDevice, shape: Shape, micro: int, samples: Samples) -> Iterator[CardCheck]:
    """Compare the goals with ratios of the measured cases."""
    plain, baseline, learned = (samples.get((case, micro)) for case in (PLAIN, BASELINE, LEARNED))
    default, speed = samples.get((PLAIN, shape.plain_micro)), "tokens_per_second"
    flops = baseline["flops_per_token"] if baseline else 1.0
    full_speed = {speed: (card.resolved.target.peak_flops or 0.0) / flops}
    goals: tuple[tuple[str, float, dict[str, Any] | None, dict[str, Any] | None, str, bool], ...] = (
        (f"speed of B to plain at micro-batch {shape.plain_micro}", 1.3, baseline, default, speed, False),
        ("speed of B to plain at equal micro-batch", 1.12, baseline, plain, speed, False),
        ("MFU of B", 0.5, baseline, full_speed, speed, False),
        ("memory of B to plain at equal micro-batch", 0.5, baseline, plain, "peak_bytes", True),
        ("step of RALEARN to B", 1.12, learned, baseline, "step_seconds", True),
    )
    for name, goal, one, other, key, most in goals:
        expected = f"at {'most' if most else 'least'} {goal:g}"
        ratio = one[key] / other[key] if one and other and other[key] else 0.0
        reason = (
            "the goal is for a GPU"
            if card.on_cpu
            else ""
            if ratio
            else "a case, or the card's peak, is not known"
        )
        good = ratio <= goal if most else ratio >= goal
        yield judge(f"goal: {name}", expected, f"{ratio:.3f}", good, reason)

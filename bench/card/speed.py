"""Compare tokens/s, MFU and memory of B and RALEARN with the plain step, the goals and the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.card.checks import Card, Check, NotRunError, judge, not_run
from bench.card.studies import UNDISTURBED, read_plan
from bench.cases import BASELINE, PLAIN, SHAPES, Shape
from bench.runner import open_workers
from bench.workers import BenchError
from gpt2.config.batch import largest_micro_batch

LEARNED = "RALEARN"
SMALL = Shape("2x64-t64", 2, 2, 64, 64, plain_micro=8)
SECONDS = {False: 4.0, True: 0.2}  # of timed steps of a case
ESTIMATES = {
    "h200": (450_000, 510_000)
}  # tokens/s of B at 124M, T = 1024, micro-batch 64, computed without a card
TO_PLAIN, TO_PLAIN_SAME_MICRO, MFU, MEMORY, LEARNED_STEP = 1.3, 1.12, 0.5, 0.5, 1.12
Samples = dict[tuple[str, int], dict[str, Any]]


def speed_checks(card: Card) -> Iterator[Check]:
    """Time each case in a new worker, then compare them. The goals are for a GPU."""
    shape = SMALL if card.on_cpu else SHAPES["cuda"][0]
    micro = shape.plain_micro if card.on_cpu else planned_micro(card, shape)
    samples: Samples = {}
    with open_workers(persistent=False) as measure:
        for case in dict.fromkeys(
            ((PLAIN, shape.plain_micro), (PLAIN, micro), (BASELINE, micro), (LEARNED, micro))
        ):
            name = f"speed: {case[0]}, {shape.name}, micro-batch {case[1]}"
            try:
                samples[case] = measure(shape, *case, SECONDS[card.on_cpu])
            except BenchError as error:
                lacks = case[0] == PLAIN and "out of memory" in f"{error}".lower()
                yield (not_run if lacks else judge_error)(name, "tokens/s", f"{error}")
                continue
            yield case_check(card, name, case, samples[case])
    yield from goal_checks(card, shape, micro, samples)


def judge_error(name: str, expected: str, error: str) -> Check:
    return judge(name, expected, error, False)


def planned_micro(card: Card, shape: Shape) -> int:
    """Return the study's micro-batch, or the next smaller one that divides the effective batch of the shape."""
    try:
        limit = read_plan(card, UNDISTURBED).batch.micro
    except NotRunError:
        limit = shape.plain_micro
    return largest_micro_batch(shape.effective, 1, limit)


def mfu(card: Card, sample: dict[str, Any]) -> float | None:
    """Return the model FLOPs utilisation; None where the card's peak is unknown."""
    peak = card.resolved.target.peak_flops
    return sample["tokens_per_second"] * sample["flops_per_token"] / peak if peak else None


def case_check(card: Card, name: str, case: tuple[str, int], sample: dict[str, Any]) -> Check:
    """Compare B with the estimate for the card. Other cases pass where they have a speed."""
    speed, share = sample["tokens_per_second"], mfu(card, sample)
    measured = f"{speed:,.0f} tokens/s, MFU {'unknown' if share is None else f'{share:.3f}'}"
    measured += "" if card.on_cpu else f", peak {sample['peak_bytes'] / 2**30:.2f} GiB"
    estimate = ESTIMATES.get(card.resolved.target.name)
    if estimate and case == (BASELINE, 64):
        low, high = estimate
        return judge(name, f"{low:,} to {high:,} tokens/s or more (estimated)", measured, speed >= low)
    return judge(name, "tokens/s (no estimate)", measured, speed > 0)


def goal_checks(card: Card, shape: Shape, micro: int, samples: Samples) -> Iterator[Check]:
    """Compare the goals with ratios of the measured cases."""
    baseline, learned = samples.get((BASELINE, micro)), samples.get((LEARNED, micro))
    plain, default = samples.get((PLAIN, micro)), samples.get((PLAIN, shape.plain_micro))

    def check(
        name: str, goal: float, one: dict[str, Any] | None, other: dict[str, Any] | None, key: str, most: bool
    ) -> Check:
        expected = f"{'at most' if most else 'at least'} {goal:g}"
        if card.on_cpu or not one or not other:
            reason = "the goal is for a GPU" if card.on_cpu else "a case could not be measured"
            return not_run(f"goal: {name}", expected, reason)
        ratio = one[key] / other[key]
        return judge(f"goal: {name}", expected, f"{ratio:.3f}", ratio <= goal if most else ratio >= goal)

    speed, peak, step = "tokens_per_second", "peak_bytes", "step_seconds"
    at = f"micro-batch {shape.plain_micro}"
    yield check(f"speed of B to plain at {at}", TO_PLAIN, baseline, default, speed, most=False)
    yield check(
        "speed of B to plain at equal micro-batch", TO_PLAIN_SAME_MICRO, baseline, plain, speed, most=False
    )
    yield check("memory of B to plain at equal micro-batch", MEMORY, baseline, plain, peak, most=True)
    yield check("step of RALEARN to B", LEARNED_STEP, learned, baseline, step, most=True)
    share = mfu(card, baseline) if baseline else None
    expected = f"at least {MFU:g}"
    if card.on_cpu or share is None:
        reason = "the goal is for a GPU" if card.on_cpu else "no speed of B, or no peak of the card"
        yield not_run("goal: MFU of B", expected, reason)
    else:
        yield judge("goal: MFU of B", expected, f"{share:.3f}", share >= MFU)

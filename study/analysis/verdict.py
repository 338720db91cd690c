"""The verdict on each real change: a paired t test over seeds against the mean of the control arms. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ra.names import is_control_arm
from study.analysis.equivalence import Losses, control_losses
from study.stats.statistics import CONFIDENCE, PairedTest, holm, mean, paired_t

BETTER = "better"
WORSE = "worse"
EQUIVALENT = "equivalent"
CANNOT_TELL = "cannot tell"

VERDICT_SEEDS = 3  # fewer have no verdict
MARGIN = math.log(1.01)  # nats: 1 % of perplexity, where plan.json names no margin


@dataclass(frozen=True)
class Verdict:
    """A real change against the mean of the control arms at the same seeds.

    word: BETTER, WORSE, EQUIVALENT or CANNOT_TELL. test: of the differences, in nats. controls: the number of control
    arms at each seed. adjusted_p: Holm's, over the variants judged together; None under VERDICT_SEEDS. margin: in
    nats, of EQUIVALENT.
    """

    variant: str
    word: str
    test: PairedTest
    controls: list[int]
    adjusted_p: float | None
    judged_together: int
    margin: float

    @property
    def seeds(self) -> int:
        return self.test.difference.count


def judge(table: Losses, margin: float = MARGIN) -> list[Verdict]:
    """Judge every real change that has a seed with a control arm. table: variant -> seed -> final loss in nats."""
    tests: dict[str, tuple[PairedTest, list[int]]] = {}
    for name, by_seed in table.items():
        if is_control_arm(name):
            continue
        pairs = zip(by_seed.values(), control_losses(table, list(by_seed)), strict=True)
        used = [(loss, arms) for loss, arms in pairs if arms]
        if used:
            differences = [loss - mean(arms) for loss, arms in used]
            tests[name] = (paired_t(differences), [len(arms) for _, arms in used])
    judged = {
        name: test.p_value
        for name, (test, _) in tests.items()
        if test.p_value is not None and test.difference.count >= VERDICT_SEEDS
    }
    adjusted = dict(zip(judged, holm(list(judged.values())), strict=True))
    return [
        Verdict(
            variant=name,
            word=_word(test, adjusted.get(name), margin),
            test=test,
            controls=controls,
            adjusted_p=adjusted.get(name),
            judged_together=len(judged),
            margin=margin,
        )
        for name, (test, controls) in tests.items()
    ]


def _word(test: PairedTest, adjusted_p: float | None, margin: float) -> str:
    """Better or worse at 5 % after Holm; else equivalent if two one-sided 5 % tests place it within the margin."""
    if adjusted_p is None:
        return CANNOT_TELL
    if adjusted_p < 1 - CONFIDENCE:
        return BETTER if test.difference.mean < 0 else WORSE
    low, high = test.narrow.low, test.narrow.high
    if low is not None and high is not None and -margin < low and high < margin:
        return EQUIVALENT
    return CANNOT_TELL

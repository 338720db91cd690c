"""Judge what another platform costs, and whether noise in training shrinks that cost. Needs no torch.

Gap of a run: its loss on a platform minus its loss on the platform of training. Three questions, in this order:

    is there a gap            mean gap of the arms without noise, against zero. If it is equivalent to zero, this is the
                              answer, and noise is not judged there
    does noise shrink it      gap with noise minus gap of the same arm without
    what does it cost         loss with noise minus loss without, on the platform of training

Each is a paired t test over seeds. The tests of one question share 5 % by Holm's method.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ra.names import is_control_arm
from referee.verdict.statistics import PairedTest, holm, mean, paired_t
from study.analysis.verdict import LEVEL, VERDICT_SEEDS

NO_GAP, GAP, SMALL_GAP = "no gap", "a gap", "a gap within the margin"
SHRINKS, GROWS = "shrinks the gap", "grows the gap"
COSTS, HELPS, FREE = "costs", "helps", "equivalent"
CANNOT_TELL, TOO_FEW = "cannot tell", "too few seeds"
ENDS = (NO_GAP, SMALL_GAP)  # no difference that noise could shrink

Losses = Mapping[str, Mapping[str, Mapping[int, float]]]  # platform -> arm -> seed -> loss in nats


@dataclass(frozen=True)
class TransferVerdict:
    """An answer. arm: with noise; "" for the gap itself. p_value, p_outside: by Holm; None under three seeds."""

    platform: str
    arm: str
    word: str
    test: PairedTest
    p_value: float | None
    p_outside: float | None

    @property
    def seeds(self) -> int:
        return self.test.difference.count


@dataclass(frozen=True)
class TransferVerdicts:
    """Answers to the three questions. gaps: one a platform. shrinks: platform and arm. costs: one an arm."""

    gaps: list[TransferVerdict]
    shrinks: list[TransferVerdict]
    costs: list[TransferVerdict]


def without_noise(arm: str) -> str:
    """Return the arm without +AQN=; "" for an arm without noise. A custom attention needs no file here."""
    parts = arm.split("+")
    others = [part for part in parts if not part.startswith("AQN=")]
    return "+".join(others) if len(others) < len(parts) else ""


def judge_transfer(
    losses: Losses, home: str, margin: float, diverged: Collection[str] = ()
) -> TransferVerdicts:
    """Judge the platforms of a study. home: the platform of training. margin: of equivalence, in nats.

    diverged: arms with a diverged run. Noise that made runs diverge is not judged by the others.
    """
    platforms = [name for name in losses if name != home]
    arms = list(losses.get(home, {}))
    controls = [arm for arm in arms if is_control_arm(arm)]
    plain = controls or [arm for arm in arms if not without_noise(arm)]
    noisy = [arm for arm in arms if without_noise(arm) and arm not in diverged]

    def gap_of(platform: str, names: Sequence[str]) -> dict[int, float]:
        return _mean_by_seed([_minus(losses[platform].get(arm, {}), losses[home][arm]) for arm in names])

    found = [_verdict(name, "", gap_of(name, plain), margin) for name in platforms]
    gaps = _decided(found, {-1: GAP, 1: GAP, 0: NO_GAP}, within=SMALL_GAP)
    open_ones = [one.platform for one in gaps if one.word not in ENDS]
    shrinks: list[TransferVerdict | None] = []
    costs: list[TransferVerdict | None] = []
    for arm in noisy:
        bases = controls if without_noise(arm) in controls else [without_noise(arm)]
        bases = [base for base in bases if base in arms]
        if not bases:
            continue
        base = _mean_by_seed([losses[home][name] for name in bases])
        costs.append(_verdict(home, arm, _minus(losses[home][arm], base), margin))
        shrinks += [
            _verdict(platform, arm, _minus(gap_of(platform, [arm]), gap_of(platform, bases)), margin)
            for platform in open_ones
        ]
    return TransferVerdicts(
        gaps,
        _decided(shrinks, {-1: SHRINKS, 1: GROWS, 0: CANNOT_TELL}),
        _decided(costs, {-1: HELPS, 1: COSTS, 0: FREE}),
    )


def _minus(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {seed: loss - other[seed] for seed, loss in one.items() if seed in other}


def _mean_by_seed(arms: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean over the arms at each seed that all of them have."""
    seeds = set.intersection(*(set(arm) for arm in arms)) if arms else set()
    return {seed: mean([arm[seed] for arm in arms]) for seed in sorted(seeds)}


def _verdict(platform: str, arm: str, by_seed: Mapping[int, float], margin: float) -> TransferVerdict | None:
    if not by_seed:
        return None
    test = paired_t(list(by_seed.values()))
    enough = len(by_seed) >= VERDICT_SEEDS
    outside = test.p_outside(margin) if enough else None
    return TransferVerdict(platform, arm, TOO_FEW, test, (test.p_value or 0.0) if enough else None, outside)


def _decided(
    answers: Sequence[TransferVerdict | None], words: Mapping[int, str], within: str = ""
) -> list[TransferVerdict]:
    """Choose the words. words: of a difference below zero, above zero, and of equivalence.

    within: of a difference that is not zero and lies within the margin.
    """
    found = [one for one in answers if one]
    judged = [one for one in found if one.p_value is not None]
    p_values = holm([one.p_value or 0.0 for one in judged])
    outside = holm([1.0 if one.p_outside is None else one.p_outside for one in judged])
    adjusted = {id(one): pair for one, *pair in zip(judged, p_values, outside, strict=True)}
    result = []
    for one in found:
        if id(one) in adjusted:
            p, q = adjusted[id(one)]
            side = 1 if one.test.difference.mean > 0 else -1
            word = CANNOT_TELL
            if p < LEVEL:
                word = within if within and q < LEVEL else words[side]
            elif q < LEVEL:
                word = words[0]
            one = replace(one, word=word, p_value=p, p_outside=q)
        result.append(one)
    return result

"""The symptom of a run: a step that is not finite, a loss spike, or losses that differ from another run's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt2.system.errors import UserError
from gpt2.train.loss_spikes import SpikeDetector
from numerics.diagnose.loss_files import LossCurve
from numerics.diagnose.pair import pair_curves
from numerics.errors import NumericsError
from scripts.bisect.play import Played
from scripts.diagnose.runs import RunSide

NAN, SPIKE, DIFFERS, ROUNDING = "nan", "spike", "differs", "rounding"
KINDS = (NAN, SPIKE, DIFFERS, ROUNDING)
OF_TWO = (DIFFERS, ROUNDING)
TEXTS = {
    NAN: "a loss or gradient norm that is not finite",
    SPIKE: "a loss spike",
    DIFFERS: "a loss or gradient norm that differs beyond rounding",
    ROUNDING: "a loss or gradient norm that is not equal to the bit",
}


@dataclass(frozen=True)
class ObservedSymptom:
    """step: the first that shows it, from 1. text: with the values. history: losses before the replay, of a spike.

    other: the curve that losses are compared with, of `differs` and `rounding`. epsilon: rounding of the run's format.
    """

    kind: str
    step: int
    text: str
    history: Sequence[float] = ()
    other: LossCurve | None = None
    epsilon: float = 2.0**-23

    def present(self, played: Played) -> bool:
        """Whether played steps show the symptom. A step that is not finite shows a spike, too."""
        if self.kind in OF_TWO:
            assert self.other
            return first_difference(played.curve("replay"), self.other, self.epsilon, self.kind) is not None
        if played.failed is not None:
            return True
        detector = SpikeDetector(self.history)
        return self.kind == SPIKE and any(
            detector.observe(loss) is not None for loss in played.losses.values()
        )

    def from_start(self, run: RunSide, start: int) -> ObservedSymptom:
        """Return the symptom for replays that start after `start` steps."""
        history = [loss for step, loss in run.curve.losses.items() if step <= start]
        return replace(self, history=history)


def first_difference(
    curve: LossCurve, other: LossCurve, epsilon: float, kind: str = DIFFERS
) -> tuple[int, str] | None:
    """Return step and values of the first difference beyond rounding (numerics.diagnose.pair), or of any size."""
    try:
        pair = pair_curves(curve, other, 0, epsilon)
    except NumericsError:
        return None
    place = pair.first_unequal() if kind == ROUNDING else pair.first_beyond_rounding()
    return (place.step, f"{place.what} {place.first!r} against {place.second!r}") if place else None


def find_symptom(run: RunSide, against: RunSide | None, step: int | None, kind: str) -> ObservedSymptom:
    """Return the symptom of a run: the first of its kind, or that at `step`. UserError where it shows none.

    Of two runs a difference beyond rounding, else any difference.
    """
    record = run.record
    assert record
    if kind in OF_TWO and against is None:
        raise UserError(f"SYMPTOM={kind} needs another run; fix: AGAINST=results/y/runs/B0")
    if against is not None and kind in ("", *OF_TWO):
        return _difference(run, against, step, (kind,) if kind else OF_TWO)
    failed = [where for where, loss in run.curve.losses.items() if not math.isfinite(loss)]
    spikes = {int(spike.iteration): spike for spike in record.spikes}
    for name, steps in ((NAN, failed), (SPIKE, sorted(spikes))):
        steps = [where for where in steps if step in (None, where)]
        if kind in ("", name) and steps:
            where = steps[0]
            text = f"the loss or gradient norm of step {where} is not finite"
            if name == SPIKE:
                text = f"loss {spikes[where].loss:.4g} at step {where}, expected {spikes[where].expected:.4g}"
            return ObservedSymptom(name, where, text)
    wanted = TEXTS[kind] if kind else "no step that is not finite and no loss spike"
    at = f" at step {step}" if step else ""
    raise UserError(
        f"{run.label} shows {f'no symptom: {wanted}' if kind else wanted}{at}; fix: compare it with another "
        f"run: make bisect RUN={run.path} AGAINST=results/y/runs/B0"
    )


def _difference(run: RunSide, against: RunSide, step: int | None, kinds: Sequence[str]) -> ObservedSymptom:
    epsilon = max(run.epsilon, against.epsilon)
    for kind in kinds:
        found = first_difference(run.curve, against.curve, epsilon, kind)
        if found is None:
            continue
        where, text = found
        if step and step < where:
            how = "does not differ beyond rounding" if kind == DIFFERS else "is equal to the bit"
            raise UserError(f"STEP={step} {how}; fix: STEP={where} or later")
        within = ", within rounding" if kind == ROUNDING and len(kinds) > 1 else ""
        text = f"{text} at step {where}{within}"
        return ObservedSymptom(kind, step or where, text, other=against.curve, epsilon=epsilon)
    how = "do not differ beyond rounding" if kinds == (DIFFERS,) else "are equal to the bit"
    raise UserError(
        f"the losses of {run.label} and {against.label} {how}, so there is nothing to "
        f'explain; fix: make diagnose RUNS="{run.path} {against.path}"'
    )

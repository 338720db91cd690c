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

NAN, SPIKE, DIFFERS = "nan", "spike", "differs"
KINDS = (NAN, SPIKE, DIFFERS)
TEXTS = {
    NAN: "a loss or gradient norm that is not finite",
    SPIKE: "a loss spike",
    DIFFERS: "a loss or gradient norm that differs beyond rounding",
}


@dataclass(frozen=True)
class Symptom:
    """step: the first that shows it, from 1. text: with the values. history: losses before the replay, of a spike.

    other: the curve that losses are compared with, of `differs`. epsilon: rounding of the run's format.
    """

    kind: str
    step: int
    text: str
    history: Sequence[float] = ()
    other: LossCurve | None = None
    epsilon: float = 2.0**-23

    def present(self, played: Played) -> bool:
        """Whether played steps show the symptom. A step that is not finite shows a spike, too."""
        if self.kind == DIFFERS:
            assert self.other
            return first_difference(played.curve("replay"), self.other, self.epsilon) is not None
        if played.failed is not None:
            return True
        detector = SpikeDetector(self.history)
        return self.kind == SPIKE and any(
            detector.observe(loss) is not None for loss in played.losses.values()
        )

    def from_start(self, run: RunSide, start: int) -> Symptom:
        """Return the symptom for replays that start after `start` steps."""
        history = [loss for step, loss in run.curve.losses.items() if step <= start]
        return replace(self, history=history)


def first_difference(curve: LossCurve, other: LossCurve, epsilon: float) -> tuple[int, str] | None:
    """Return step and values of the first difference beyond rounding (numerics.diagnose.pair)."""
    try:
        place = pair_curves(curve, other, 0, epsilon).first_beyond_rounding()
    except NumericsError:
        return None
    return (place.step, f"{place.what} {place.first!r} against {place.second!r}") if place else None


def find_symptom(run: RunSide, against: RunSide | None, step: int | None, kind: str) -> Symptom:
    """Return the symptom of a run: the first of its kind, or that at `step`. UserError where it shows none."""
    record = run.record
    assert record
    if kind == DIFFERS and against is None:
        raise UserError("SYMPTOM=differs needs another run; fix: AGAINST=results/y/runs/B0")
    if against is not None and kind in ("", DIFFERS):
        epsilon = max(run.epsilon, against.epsilon)
        found = first_difference(run.curve, against.curve, epsilon)
        if found is None:
            raise UserError(
                f"the losses of {run.label} and {against.label} do not differ beyond rounding, so there is nothing to "
                f'explain; fix: make diagnose RUNS="{run.path} {against.path}"'
            )
        where, text = found
        if step and step < where:
            raise UserError(f"STEP={step} does not differ beyond rounding; fix: STEP={where} or later")
        return Symptom(
            DIFFERS, step or where, f"{text} at step {where}", other=against.curve, epsilon=epsilon
        )
    failed = [where for where, loss in run.curve.losses.items() if not math.isfinite(loss)]
    spikes = {int(spike.iteration): spike for spike in record.spikes}
    for name, steps in ((NAN, failed), (SPIKE, sorted(spikes))):
        steps = [where for where in steps if step in (None, where)]
        if kind in ("", name) and steps:
            where = steps[0]
            text = f"the loss or gradient norm of step {where} is not finite"
            if name == SPIKE:
                text = f"loss {spikes[where].loss:.4g} at step {where}, expected {spikes[where].expected:.4g}"
            return Symptom(name, where, text)
    wanted = TEXTS[kind] if kind else "no step that is not finite and no loss spike"
    at = f" at step {step}" if step else ""
    raise UserError(
        f"{run.label} shows {f'no symptom: {wanted}' if kind else wanted}{at}; fix: compare it with another "
        f"run: make bisect RUN={run.path} AGAINST=results/y/runs/B0"
    )

"""Run the checks of an examination in order, and collect their violations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from ra.admission import batches, causality, gradients, interface, repeatability
from ra.admission.probe import Probe, difference, inputs, restored_generators, run
from ra.admission.results import FAILED, OUTSIDE, PASSED, Examination, Outcome, Violation, describe, violation
from ra.global_state import FIX

Check = Callable[[Probe], Iterator[Violation]]
CHECKS: dict[str, Check] = {  # the names and their meaning: ra.admission.results
    interface.INPLACE: interface.inplace,  # first, since its backward may raise
    interface.SHAPE: interface.shape,
    repeatability.DETERMINISTIC: repeatability.deterministic,
    repeatability.STATE: repeatability.state,
    causality.CAUSAL: causality.causal,
    batches.BATCH: batches.batch,
    repeatability.MODE: repeatability.mode,
    causality.LENGTH: causality.length,
    interface.FINITE: interface.finite,
    gradients.GRADIENTS: gradients.gradients,
    gradients.SHARED: gradients.shared,
    interface.STEP: interface.step,
}
LEAKS = "not examined: outputs depend on the future, so on the length"
MOST_FAULTS = 3  # of one check: further layers have the same


def examine(probe: Probe, on_check: Callable[[str], None] = lambda name: None) -> Examination:
    """Make every check. on_check: called with the name of each check before it."""
    outcomes: list[Outcome] = []
    violations: list[Violation] = []
    reason = ""
    with restored_generators():
        for name, check in CHECKS.items():
            began = time.perf_counter()
            found: list[Violation] = []
            failed = {one.check for one in violations}
            skipped = reason or (LEAKS if name == causality.LENGTH and causality.CAUSAL in failed else "")
            if not skipped:
                on_check(name)
                found = _found(name, check, probe)
            result = skipped or (FAILED if found else PASSED)
            outcomes.append(Outcome(name, result, round(time.perf_counter() - began, 3)))
            violations += found
            reason = reason or _obstacle(name, found, probe)
        probe.forget()
    changed = probe.before.changed()
    if changed:  # the first violation: others may follow from it
        message = f"a call changes {changed}: every run's numbers would depend on it"
        violations.insert(0, Violation(probe.name, OUTSIDE, message, FIX))
    outcomes.append(Outcome(OUTSIDE, FAILED if changed else PASSED, 0.0))
    return Examination(probe.name, tuple(outcomes), tuple(violations))


def _found(name: str, check: Check, probe: Probe) -> list[Violation]:
    found: list[Violation] = []
    try:
        found += itertools.islice(check(probe), MOST_FAULTS)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        fix = "correct that line"
        found.append(violation(f"{describe(error)} during this check", fix, None, error))
    return [one.replace(variant=probe.name, check=name) for one in found]


def _obstacle(name: str, found: list[Violation], probe: Probe) -> str:
    """Why no further check is meaningful; "" where it is."""
    if not found:
        return ""
    if name == interface.SHAPE:
        return "not examined: the attention does not run"
    if name == repeatability.DETERMINISTIC and not _repeatable(probe):
        return "not examined: two passes on one input differ"
    return ""


def _repeatable(probe: Probe) -> bool:
    """Whether seeded passes on fresh copies agree, with a pass on another input between them."""
    dtype = probe.dtypes[-1]
    first, other = (inputs(2, probe.ordinary, probe.shape.width, dtype, seed) for seed in (0, 1))
    for _, module in probe.parts("perturbed", dtype):
        outputs = [run(module, x_BTC) for x_BTC in (first, other, first)]
        if difference(outputs[0], outputs[2])[0] > 0:
            return False
    return True

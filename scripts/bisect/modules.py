"""Search over modules, with each kind of fix, and over the phases of a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gpt2.numerics.fixes import LOSS
from gpt2.system.errors import UserError
from numerics.search.fix_words import units
from numerics.search.smallest_set import smallest_set
from scripts.bisect.play import FROZEN, PHASES, SGD, UNFUSED
from scripts.bisect.session import BisectSession, Result
from scripts.bisect.symptoms import DIFFERS

KIND_TEXTS = {"upcast": "in a wider format", "small": "by small operations", "cpu": "on the CPU"}
PHASE_MEANING = {
    FROZEN: "forward and backward on the weights before",
    SGD: "an optimizer without moments",
    UNFUSED: "AdamW by small operations",
}


def search_phases(session: BisectSession) -> Result:
    """Replay without updates, with SGD and with unfused AdamW, and conclude where the fault is."""
    before = session.journal.asked
    symptom = session.symptom
    # another optimizer leads to other losses than those of the other run
    phases = (UNFUSED,) if symptom.kind == DIFFERS else PHASES
    shown = {phase: session.shows(phase=phase) for phase in phases}
    rows = [
        (f"{phase} ({PHASE_MEANING[phase]})", "symptom" if is_ else "gone") for phase, is_ in shown.items()
    ]
    text, found = _conclude(session, shown)
    return Result("phases", text, found, tuple(rows), replays=session.journal.asked - before)


def _conclude(session: BisectSession, shown: dict[str, bool]) -> tuple[str, tuple[str, ...]]:
    if not shown.get(UNFUSED, True):
        return "the fused kernel of AdamW: with small operations the symptom is gone", ("optimizer", UNFUSED)
    if session.symptom.kind == DIFFERS:
        return "unfused AdamW does not explain the difference", ()
    if shown[FROZEN]:
        phase = _first_phase(session)
        return f"{phase}: the symptom stays on the weights before it, without any update", (phase,)
    if not shown[SGD]:
        return (
            "optimizer: AdamW's update leads to the symptom, and updates of the same size by SGD do not",
            ("optimizer",),
        )
    return (
        "several updates: the symptom needs updates of the weights, by AdamW as by SGD (learning rate, gradients)",
        (),
    )


def _first_phase(session: BisectSession) -> str:
    """Return the phase of the first value that was not finite, as run.json has it."""
    found = {fault.iteration + 1: fault.what for fault in session.record.faults}.get(session.symptom.step)
    phases = {"gradient": "backward", "output": "forward", "loss": "forward"}
    return phases.get(found or "", "forward or backward")


def search_modules(session: BisectSession, kinds: Sequence[str]) -> Result:
    """Find the smallest set of modules that, fixed, makes the symptom vanish; with the first kind that can."""
    before = session.journal.asked
    model = session.player.run.stepper.model
    rows: list[tuple[str, str]] = []
    for kind in kinds:
        items = [f"{kind}:{path}" for path in [*units(model)[:-1], LOSS]]
        try:
            found = smallest_set(items, lambda words: not session.shows(" ".join(words)))
        except UserError as error:
            rows.append((f"all modules {KIND_TEXTS[kind]}", f"not possible: {error}"))
            continue
        if found is None:
            rows.append((f"all modules {KIND_TEXTS[kind]}", "symptom"))
            continue
        rows.append((f"all modules {KIND_TEXTS[kind]}", "gone"))
        words = _refined(session, model, found)
        for word in words:
            rows.append((word, "needed"))
        text = (
            f"{', '.join(word.partition(':')[2] for word in words)} {KIND_TEXTS[kind]}: the symptom is gone"
        )
        return Result("modules", text, words, tuple(rows), " ".join(words), session.journal.asked - before)
    text = "no fix of all modules makes the symptom vanish: it is not the rounding of a module"
    return Result("modules", text, (), tuple(rows), replays=session.journal.asked - before)


def _refined(session: BisectSession, model: nn.Module, words: tuple[str, ...]) -> tuple[str, ...]:
    """Replace modules by modules within them, where those suffice."""
    finer: list[str] = []
    for word in words:
        kind, _, path = word.partition(":")
        children = [] if path == LOSS else [name for name, _ in model.get_submodule(path).named_children()]
        finer += [f"{kind}:{path}.{name}" for name in children] or [word]
    if set(finer) == set(words) or session.shows(" ".join(finer)):
        return words
    found = smallest_set(finer, lambda chosen: not session.shows(" ".join(chosen)))
    return _refined(session, model, found) if found else words

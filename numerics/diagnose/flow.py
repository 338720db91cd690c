"""Walk the flow of the manual: checklist, first differing step, record, compare. Do each step that the disk allows.

The steps to record, in this order (sections 2.3.1.1 to 2.3.2.2): the step at which the curves part by more than
rounding, the step before it, and the first step that is unequal in any bit. The walk ends at the first comparison
whose cause is an operation: unequal weights point to a step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numerics.compare.records import rank_folders
from numerics.diagnose.pair import LOSS, DifferingValue
from numerics.diagnose.rules import (
    DOWNSTREAM,
    DRIFT,
    NONE,
    NOT_REPRODUCIBLE,
    OVERFLOW,
    SPIKES,
    Diagnosis,
)
from numerics.setup.checklist_rows import FATAL, HARMLESS, NOT_RECORDED, SUSPECT, ChecklistRow

if TYPE_CHECKING:
    from numerics.compare.run import Comparison

DONE, NEXT, LATER = "done", "next", "later"
# Groups of the checklist. Where a fatal row of them differs, records of one step have other inputs or weights.
BLOCKING = ("study", "data", "model", "batch", "schedule", "hyper-parameters")
SHOWN = 40  # characters of a value


@dataclass(frozen=True)
class Command:
    """A command, and the machine to run it on; "" for any."""

    machine: str
    text: str


@dataclass(frozen=True)
class Side:
    """One run. record: (step, task) -> the command that records it. folder: step -> its record, which may not exist."""

    machine: str
    record: Callable[[int, str], str]
    folder: Callable[[int], Path]


@dataclass(frozen=True)
class Situation:
    """Facts beside the curves. checks: all rows; None where no checklist was made, for the reason unchecked.

    compare: (target, golden) -> the command that compares two records. first: the step number of the first step.
    monitored: what the monitor files of the runs show, in sentences; None where there are none.
    """

    sides: tuple[Side, Side]
    compare: Callable[[Path, Path], str]
    checks: Sequence[ChecklistRow] | None = None
    unchecked: str = (
        "the files hold losses only; pack both machines with ConfigChecker, then "
        "python -m numerics check-config compare A.zip B.zip"
    )
    check_command: str = ""
    first: int = 0
    monitored: Callable[[], Sequence[str]] | None = None


@dataclass(frozen=True)
class FlowStep:
    """A step of the flow. state: done, next or later."""

    title: str
    section: str
    state: str
    finding: str


@dataclass
class Flow:
    """The steps, the commands that are next, and the comparison of two records that was made, if any."""

    steps: list[FlowStep] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    comparison: Comparison | None = None
    recorded: int | None = None  # the step that was compared, else the one to record
    cause: str = ""  # the first divergence that is not a consequence of unequal weights


def walk(diagnosis: Diagnosis, situation: Situation) -> Flow:
    """Do every step that the disk allows; the commands are those of the first one that it does not."""
    flow = Flow()
    found = diagnosis.finding
    flow.steps.append(
        FlowStep("Symptom", found.symptom.section, DONE, f"{found.symptom.name}: {found.evidence}")
    )
    blocked = _checklist(flow, situation)
    flow.steps.append(FlowStep("First differing step", "2.3.1.2", DONE, differing(diagnosis)))
    if situation.monitored is not None and found.symptom.name in (SPIKES, OVERFLOW, DRIFT):
        flow.steps.append(FlowStep("Monitor", "4.6", DONE, ". ".join(situation.monitored())))
    if diagnosis.unequal is None and found.symptom.name == NONE:
        return flow
    if blocked:
        flow.steps += [
            FlowStep("Record", "4.3", LATER, "after the runs have equal settings"),
            FlowStep("Compare the records", "4.5", LATER, "after both records exist"),
        ]
        return flow
    if found.symptom.name == NONE and diagnosis.beyond is None:
        flow.steps.append(FlowStep("Record", "4.3", DONE, "not needed: rounding explains the differences"))
        return flow
    _records(flow, diagnosis, situation)
    return flow


def _checklist(flow: Flow, situation: Situation) -> bool:
    """Add the checklist. Return whether it forbids to compare records."""
    checks = situation.checks
    if checks is None:
        flow.steps.append(FlowStep("Checklist", "2.1", LATER, f"not made: {situation.unchecked}"))
        return False
    finding = f"{len(checks)} entries"
    for status in (FATAL, SUSPECT, HARMLESS, NOT_RECORDED):
        rows = [check for check in checks if check.status == status]
        named = [
            f"{row.subject}{_values(row)}" if status in (FATAL, SUSPECT) else row.subject for row in rows
        ]
        finding += f"; {len(rows)} {status}: {', '.join(named)}" if rows else ""
    blocks = [check.subject for check in checks if check.status == FATAL and check.group in BLOCKING]
    if blocks:
        finding += f". Other {', '.join(blocks)} give other losses: make them equal and train again"
        flow.commands.append(Command("", situation.check_command))
    flow.steps.append(FlowStep("Checklist", "2.1", NEXT if blocks else DONE, finding))
    return bool(blocks)


def _values(check: ChecklistRow) -> str:
    shown = [value if len(value) <= SHOWN else f"{value[:SHOWN]}..." for value in check.values]
    return f" ({' | '.join(shown)})"


def differing(diagnosis: Diagnosis) -> str:
    """Return the first unequal value and the first one beyond rounding, in words."""
    unequal, beyond = diagnosis.unequal, diagnosis.beyond
    if unequal is None:
        return "none: all common values are equal"
    text = f"first unequal: {_words(unequal)}"
    if beyond is None:
        return f"{text}; the growth of rounding explains all differences"
    if beyond == unequal:
        return f"{text}, which rounding does not explain"
    return f"{text}; first beyond the growth of rounding: {_words(beyond)}"


def _words(place: DifferingValue) -> str:
    values = f"{place.first:.9g} against {place.second:.9g}"
    return f"{place.what} of step {place.step} ({values}, relative {place.relative:.2g})"


def steps_to_record(diagnosis: Diagnosis, first: int) -> list[tuple[int, str]]:
    """Return the steps to record and why, the most telling one first. first: the number of the first step."""
    finding, last = diagnosis.finding, int(diagnosis.pair.steps[-1])
    name = finding.symptom.name
    place = diagnosis.unequal if name == NOT_REPRODUCIBLE else diagnosis.beyond or diagnosis.unequal
    found: list[tuple[int, str]] = []
    if name == DOWNSTREAM:
        found = [(last, "the last common step: its weights are those that were evaluated")]
    elif name == OVERFLOW:
        found = [
            (finding.step, f"the first {finding.what} that is finite in one run only"),
            (finding.step - 1, "backward of the step before, if a weight is not finite"),
        ]
    elif name == SPIKES and (place is None or place.step > finding.step):
        found = _around(finding.step, finding.what)
    elif place is not None:
        found = _around(place.step, place.what)
    if diagnosis.unequal is not None and name != DOWNSTREAM:
        found.append((diagnosis.unequal.step, "the first step that is unequal in any bit"))
    found = [(step, why) for step, why in found if step >= first]
    return [item for place, item in enumerate(found) if item[0] not in [step for step, _ in found[:place]]]


def _around(step: int, what: str) -> list[tuple[int, str]]:
    if what != LOSS:
        return [(step, "backward, where the gradient norm parts")]
    return [(step, "forward, where the loss parts"), (step - 1, "backward of the step before it")]


def _records(flow: Flow, diagnosis: Diagnosis, situation: Situation) -> None:
    """Compare the records that exist, step by step; else name the commands that record the next step."""
    task = "hash" if diagnosis.symptom.name == NOT_REPRODUCIBLE else "statistics"
    steps = steps_to_record(diagnosis, situation.first)
    unequal_weights: tuple[int, str] = (
        0,
        "",
    )  # the step at which a comparison found other weights, and where
    for step, why in steps:
        folders = [side.folder(step) for side in situation.sides]
        missing = [
            side for side, folder in zip(situation.sides, folders, strict=True) if not is_record(folder)
        ]
        flow.recorded = step
        if missing:
            finding = f"step {step}: {why}; {len(missing)} of 2 records missing"
            flow.steps.append(FlowStep("Record", "4.3", NEXT, finding))
            flow.steps.append(FlowStep("Compare the records", "4.5", LATER, "after both records exist"))
            flow.commands += [Command(side.machine, side.record(step, task)) for side in missing]
            flow.commands.append(Command("", situation.compare(folders[1], folders[0])))
            return
        flow.steps.append(FlowStep("Record", "4.3", DONE, f"step {step}: {why}; both records exist"))
        flow.comparison = _compare(folders[1], folders[0])
        flow.steps.append(FlowStep("Compare the records", "4.5", DONE, compared(flow.comparison)))
        first = flow.comparison.first
        if first is None and unequal_weights[0] == step + 1:
            flow.cause = (
                f"the update of the weights after step {step}: its gradients agree, and the weights of step {step + 1} "
                f"do not, first {unequal_weights[1]} (optimizer, learning rate or memory)"
            )
            check = (
                "check settings and kernels of the optimizer, or replace it by SGD on both machines (2.3.1.3)"
            )
            flow.commands.append(Command("", check))
            return
        if first is not None and (first[1].cause != "parameter" or step == situation.first):
            from numerics.compare.summary import next_command

            flow.cause = flow.steps[-1].finding.partition(": ")[2]
            flow.commands.append(Command("", next_command(flow.comparison).removeprefix("next: ")))
            return
        unequal_weights = (step, first[1].name) if first is not None else (0, "")
    names = ", ".join(str(step) for step, _ in steps)
    finding = f"the records of step {names} name no operation; record the steps before them (2.3.1.3)"
    flow.steps.append(FlowStep("Record", "4.3", NEXT, finding))


def is_record(folder: Path) -> bool:
    """Whether a folder holds a record: a rank's, a step's or a dump's."""
    return folder.is_dir() and any(rank_folders(folder))


def _compare(target: Path, golden: Path) -> Comparison:
    from numerics.compare.run import compare_records  # loads torch

    return compare_records(target, golden)


def compared(comparison: Comparison) -> str:
    """Return the verdict and the first divergence in one line."""
    if not (found := comparison.first):
        return f"{comparison.verdict_text}: no operation differs by more than rounding"
    first = found[1]
    what = f"; {'; '.join(first.what[:2])}" if first.what and first.cause != "parameter" else ""
    return f"{comparison.verdict}: {first.name} ({first.direction}): {first.why}{what}"


def as_json(flow: Flow) -> dict[str, Any]:
    """Return the flow as plain data."""
    comparison = None
    if flow.comparison is not None:
        from numerics.compare.write import as_json as comparison_json

        comparison = {key: value for key, value in comparison_json(flow.comparison).items() if key != "rows"}
    return {
        "flow": [vars(step) for step in flow.steps],
        "next": [vars(command) for command in flow.commands],
        "record_step": flow.recorded,
        "cause": flow.cause or None,
        "comparison": comparison,
    }

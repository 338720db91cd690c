"""Compare two records: every step and rank that both have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from referee.errors import NumericsError
from referee.numerics.compare.compared_rows import Earlier, measure_rows
from referee.numerics.compare.first_divergence import StepComparison, changed_selection, judge
from referee.numerics.compare.joined_calls import join_merged_layers, join_micro_batches, merge_ranks
from referee.numerics.compare.matched_calls import NameMap, match_calls, recorded_by_both, unwrap
from referee.numerics.compare.row_tree import Divergence, RowTree
from referee.numerics.record.read_record import StepRecord, find_records, read_record
from referee.numerics.rows import TableRow

OTHER_RECORDER = (
    "one record is msProbe's: gradients that a function's backward returns, and arguments that the other side "
    "has at another place, are not compared"
)


@dataclass(frozen=True)
class Comparison:
    """The comparison of two records. notes: of the records, and steps or ranks on one side alone."""

    target: Path
    golden: Path
    steps: list[StepComparison]
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Return "equal", "rounding" or "diverges"."""
        found = {step.verdict for step in self.steps}
        return next(verdict for verdict in ("diverges", "rounding", "equal") if verdict in found)

    @property
    def verdict_text(self) -> str:
        """Return the verdict; with "incomplete" where it is not "diverges" and not all was recorded or compared."""
        return self.verdict + (", incomplete" if self.incomplete and self.verdict != "diverges" else "")

    @property
    def incomplete(self) -> list[str]:
        """Return what was not recorded, what could not be compared, and what could not be judged."""
        found = [
            f"{side}: {text}"
            for step in self.steps
            for side, record in (("target", step.tree.target), ("golden", step.tree.golden))
            for text in record.incomplete
        ]
        fix = 'its effect is hidden by rounding; fix: record both sides with "task": "tensor"'
        undecided = [f"{text}: {fix}" for step in self.steps for text in step.undecided]
        return list(dict.fromkeys([*found, *self.uncompared, *undecided]))

    @property
    def uncompared(self) -> list[str]:
        """Return the tensors without recorded values or statistics on one side or both, with the reason."""
        found: dict[str, None] = {}
        for step in self.steps:
            where = f"{step.place} " if len(self.steps) > 1 else ""
            for row in step.rows:
                for cell in row.cells:
                    reasons = [
                        side.unknown for side in (cell.target, cell.golden) if side and side.is_unknown
                    ]
                    if reasons:
                        found[f"{where}{row.name} {cell.side} {cell.place}: {reasons[0]}"] = None
        return list(found)

    @property
    def first(self) -> Divergence | None:
        """Return the first divergence: of the earliest step, and there of the rank where it comes first."""
        found = [step.divergence for step in self.steps if step.divergence]
        return min(found, key=lambda one: (_place(one.step)[0], one.order), default=None)

    @property
    def first_unequal(self) -> str | None:
        """Return the name of the first call with an unequal result, be it by rounding."""
        firsts = (step.first_unequal for step in self.steps)
        return next((row.name for row in firsts if row), None)

    @property
    def rows(self) -> list[TableRow]:
        """Return the first divergence, then all other differences of settings and parameters."""
        first = [self.first] if self.first else []
        return [*first, *(row for step in self.steps for row in step.findings)]


def compare_records(
    target: Path,
    golden: Path,
    names: NameMap | None = None,
    ranks: str = "equal",
) -> Comparison:
    """Compare a record with a golden one; both are folders of a dump, a step or a rank.

    names: {target: golden}; see read_map. ranks: "equal" pairs rank with rank; "merged" makes one record of the
    target's ranks of a step, which share the work of one golden rank: see merge_ranks. NumericsError where a record
    cannot be used.
    """
    pairs, notes = _paired(_folders(target, ranks == "merged"), _folders(golden, False))
    steps: list[StepComparison] = []
    targets: set[str] = set()
    goldens: set[str] = set()
    for place, folders, (other,) in pairs:
        sides, there = [read_record(folder) for folder in folders], read_record(other)
        here = merge_ranks(sides, there) if len(sides) > 1 else sides[0]
        targets |= _names(here)
        goldens |= _names(there)
        notes += _notes(here, there)
        tree, more = _matched(here, there, names or {})
        notes += more
        steps.append(judge(place, tree, _earlier(place, steps)))
    _check_map(names or {}, targets, goldens)
    return Comparison(target, golden, steps, list(dict.fromkeys(notes)))


def _matched(here: StepRecord, there: StepRecord, names: NameMap) -> tuple[RowTree, list[str]]:
    """Join and match the calls of two records, and measure them. Returns notes as well."""
    if not names:
        here, there = unwrap(here, there), unwrap(there, here)
    here, there, notes = join_micro_batches(here, there)
    here, there, merged, left = join_merged_layers(here, there, names)
    notes = [*notes, *merged]
    matched = match_calls(here, there, left)
    if here.by_msprobe != there.by_msprobe:
        matched = [recorded_by_both(*pair) for pair in matched]
        notes.append(OTHER_RECORDER)
    rows = measure_rows(matched, here, there)
    if not any(row.target and row.golden for row in rows):
        raise NumericsError(
            f"no call of {here.folder} is in {there.folder}; fix: record the same model at the same level, "
            "or give --map"
        )
    return RowTree(rows, here, there), notes


def _notes(here: StepRecord, there: StepRecord) -> list[str]:
    """Return the notes of both records, and how their steps and settings differ."""
    sides = {"target": here, "golden": there}
    notes = [f"{side}: {note}" for side, record in sides.items() for note in record.notes]
    steps = [_step_of(record.folder) for record in sides.values()]
    if None not in steps and steps[0] != steps[1]:
        notes.append(f"the steps differ: {steps[0]} of the target, {steps[1]} of the golden record")
    if changed := sorted(changed_selection(here, there)):
        texts = (f"{name} {here.selection.get(name)} against {there.selection.get(name)}" for name in changed)
        notes.append(
            f"the records have other settings, so calls on one side alone may not be judged: {', '.join(texts)}"
        )
    return notes


def _step_of(folder: Path) -> str | None:
    """Return the step of a folder such as dump/step0/rank0."""
    return next((part for part in reversed(folder.resolve().parts) if re.fullmatch(r"step\d+", part)), None)


def _names(record: StepRecord) -> set[str]:
    """Return the names that a map may have: of calls, modules, and what modules are in."""
    paths = [call.path.split(".") for call in record.calls.values() if call.is_module]
    return set(record.calls) | {".".join(parts[:end]) for parts in paths for end in range(len(parts) + 1)}


def _check_map(names: NameMap, targets: set[str], goldens: set[str]) -> None:
    others = [other for given in names.values() for other in ([given] if isinstance(given, str) else given)]
    for side, listed, known in (("target", names, targets), ("golden record", others, goldens)):
        for name in listed:
            if name not in known:
                raise NumericsError(
                    f'the map names "{name}", which is not a module or call of the {side}; fix: correct the map'
                )


def _earlier(place: str, steps: Sequence[StepComparison]) -> Earlier | None:
    """Return the steps before a step, if the last of them is the step just before and none diverges."""
    number, rank = _place(place)
    mine = [step for step in steps if _place(step.place)[1] == rank]
    last = next((step for step in mine if _place(step.place)[0] == number - 1), None)
    if last is None or any(step.divergence for step in mine):
        return None
    error = max((row.error("gradient") for step in mine for row in step.rows), default=0.0)
    return Earlier(last.rows, last.place, error, all(step.verdict == "equal" for step in mine))


def _place(place: str) -> tuple[int, str]:
    """Return step and rank of a place such as "step0/rank0"."""
    found = re.match(r"step(\d+)(.*)", place)
    return (int(found[1]), found[2]) if found else (-1, place)


def _folders(path: Path, merged: bool) -> dict[str, list[Path]]:
    """Return the folders of each step and rank; merged: those of all ranks of a step, by the place of the first."""
    first: dict[Any, str] = {}
    found: dict[str, list[Path]] = {}
    for place, folder in find_records(path).items():
        found.setdefault(first.setdefault(_place(place)[0] if merged else place, place), []).append(folder)
    return found


def _paired(
    targets: Mapping[str, list[Path]], goldens: Mapping[str, list[Path]]
) -> tuple[list[tuple[str, list[Path], list[Path]]], list[str]]:
    """Pair steps and ranks by name, or the only ones of both sides."""
    if len(targets) == len(goldens) == 1:
        (mine,), ((place, other),) = targets.values(), goldens.items()
        return [("" if place == "." else place, mine, other)], []
    both = [place for place in goldens if place in targets]
    if not both:
        raise NumericsError(
            f"the records share no step and rank: {', '.join(targets)} against {', '.join(goldens)}; "
            "fix: give one step of each, such as dump/step0"
        )
    alone = [
        f"{place} is in the {side} record alone"
        for side, mine, other in (("target", targets, goldens), ("golden", goldens, targets))
        for place in mine
        if place not in other
    ]
    return [(place, targets[place], goldens[place]) for place in both], alone

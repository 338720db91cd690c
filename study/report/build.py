"""The numbers of a study's report, from its records alone; `study.report.markdown` puts them into words.
Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ra.names import PATTERNS, is_control_arm
from study.analysis.allowance import NO_ALLOWANCE, Allowance, Allowances, by_schedule, by_time, of_time
from study.analysis.evidence import Evidence, Losses, gather
from study.analysis.timing import early, told_margin
from study.analysis.verdict import Judged, arms_of, fewest_arms, judge, widest
from study.records.hellaswag_scores import HellaSwagScore, Items, common_items, hellaswag, left_out
from study.records.lengths import shown_length
from study.records.runs import BASELINE, Run, losses, provenance, read_runs
from study.stats.statistics import Interval, NoiseFloor, mean, mean_interval, noise_floor


@dataclass
class Row:
    """One variant. Losses in nats; perplexities are their exponentials; intervals are 95 %.

    Final and best losses are of the runs that ended their schedule, None without one.
    """

    variant: str
    equivalent: bool
    seeds: list[int]
    final_loss: Interval | None
    best_loss: Interval | None
    equal_tokens_loss: Interval | None
    against_baseline: Interval | None  # paired by seed, final losses
    against_baseline_equal_tokens: Interval | None
    allowance: Allowance  # of against_baseline
    allowance_equal_tokens: Allowance
    hellaswag: HellaSwagScore
    iterations: float
    tokens: float
    train_seconds: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_bytes: int | None
    cut: int  # runs whose schedule was cut


@dataclass
class Report:
    """same_point: every run ended at equal_tokens, so that final and equal-token numbers are the same numbers.

    cut: runs whose schedule the training clock cut short, where that made them end before the others: their final
    losses count in no difference, no noise floor and no verdict; at equal tokens they do.
    early: variants whose counts were timed on a slower machine (`study.analysis.timing`). misplanned: real
    changes that ended
    at other tokens than the arms, and nobody knows what that may be worth: no difference and no verdict there.
    """

    study: str
    runs: list[Run]
    rows: list[Row]
    floor: NoiseFloor | None
    judged: list[Judged]
    judged_equal_tokens: list[Judged]
    equal_tokens: int | None
    same_point: bool
    learned: dict[str, dict[str, list[float]]]  # variant -> {"first": [p a layer], "last": [...]}
    budget: dict[str, Any]
    effective_batch: int | None
    block_size: int | None
    validation_tokens: int | None
    target: dict[str, Any] | None
    notes: list[str]
    cut: list[str]
    early: list[str]
    misplanned: dict[str, Allowance]
    evidence: Evidence


def common_tokens(runs: list[Run]) -> int | None:
    """The largest number of tokens at which every run was evaluated."""
    grids = [set(losses(run.record)) for run in runs]
    shared = set.intersection(*grids) if grids else set()
    return max(shared) if shared else None


def paired(table: Losses, variant: str) -> Interval | None:
    """The variant minus the baseline at the seeds that both have."""
    base, own = table.get(BASELINE, {}), table.get(variant, {})
    differences = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
    return mean_interval(differences) if differences and variant != BASELINE else None


def build_report(study_dir: Path) -> Report:
    """Everything that the report says, as numbers."""
    shown = shown_length(study_dir)
    runs = read_runs(study_dir, shown.length)
    used = [run for run in runs if run.used]
    order = list(PATTERNS)
    variants = sorted(
        {run.variant for run in used}, key=lambda name: (order.index(name) if name in order else 99, name)
    )
    tokens = common_tokens(used)
    level = _table(used, variants, lambda seen: losses(seen)[tokens]) if tokens is not None else {}
    first = used[0].record if used else None
    plan = _plan(study_dir / (shown.length.plan if shown.length else "plan.json"))
    ends = {run.record["progress"]["tokens"] for run in used}
    short = [run for run in used if was_cut(run.record)] if len(ends) > 1 else []
    ended = [run for run in used if run not in short]
    times = by_time(ended)
    schedules = by_schedule(used)
    apart = {name: seen for name, seen in times.items() if seen.move is None}
    compared = [run for run in ended if run.variant not in apart]
    final = _table(
        compared, [name for name in variants if name not in apart], lambda seen: seen["validation"]["loss"]
    )
    floor = noise_floor(arms_of(final))
    judged = judge(final, times)
    items = common_items([run.record for run in used])
    return Report(
        study=study_dir.resolve().name,
        runs=runs,
        rows=[_row(name, used, short, final, level, items, schedules) for name in variants],
        floor=floor,
        judged=judged,
        judged_equal_tokens=judge(level, schedules),
        equal_tokens=tokens,
        same_point=bool(used) and all(run.record["progress"]["tokens"] == tokens for run in used),
        learned=_learned(used),
        budget=plan["budget"],
        effective_batch=first["batch"]["effective"] if first else None,
        block_size=first["batch"]["block_size"] if first else None,
        validation_tokens=first["validation"]["tokens"] if first else None,
        target=first["target"] if first else None,
        notes=_notes([*filter(None, [shown.note]), *plan["notes"]], used),
        cut=[run.name for run in short],
        early=early(plan["budget"], ended),
        misplanned=apart,
        evidence=gather(
            study_dir, used, compared, final, fewest_arms(final), floor, widest(judged)
        ),
    )  # fmt: skip


def _table(used: list[Run], variants: list[str], value: Callable[[dict[str, Any]], float]) -> Losses:
    return {
        name: {run.seed: value(run.record) for run in used if run.variant == name and run.seed is not None}
        for name in variants
    }


def was_cut(seen: dict[str, Any]) -> bool:
    """Whether the training clock ended the run before its schedule did."""
    return bool((seen.get("schedule") or {}).get("cut"))


def _row(
    name: str,
    used: list[Run],
    short: list[Run],
    final: Losses,
    level: Losses,
    items: Items | None,
    schedules: Allowances,
) -> Row:
    """Of the variant's runs that ended their schedule; of a variant that has none, what does not depend on the end.

    final: the losses that are compared at the end of the budget.
    """
    own = [run for run in used if run.variant == name]
    ended = [run.record for run in own if run not in short]
    records = ended or [run.record for run in own]

    def known(part: str, key: str) -> list[Any]:
        return [seen[part][key] for seen in records if seen[part] and seen[part][key] is not None]

    speeds, mfu = known("throughput", "tokens_per_second"), known("throughput", "mfu")
    best = [min([*losses(seen).values(), seen["validation"]["loss"]]) for seen in ended]
    return Row(
        variant=name,
        equivalent=is_control_arm(name),
        seeds=sorted(run.record["seed"] for run in own),
        final_loss=mean_interval([seen["validation"]["loss"] for seen in ended]) if ended else None,
        best_loss=mean_interval(best) if ended else None,
        equal_tokens_loss=mean_interval(list(level[name].values())) if level else None,
        against_baseline=paired(final, name),
        against_baseline_equal_tokens=paired(level, name) if level else None,
        allowance=_to_baseline(name, [run for run in used if run not in short]),
        allowance_equal_tokens=schedules.get(name, NO_ALLOWANCE),
        hellaswag=hellaswag(records, items),
        iterations=mean(known("progress", "iterations")),
        tokens=mean(known("progress", "tokens")),
        train_seconds=mean(known("progress", "train_seconds")),
        tokens_per_second=mean(speeds) if speeds else None,
        mfu=mean(mfu) if mfu else None,
        peak_memory_bytes=max(known("memory", "peak_allocated_bytes"), default=None),
        cut=sum(was_cut(run.record) for run in own),
    )


def _to_baseline(name: str, ended: list[Run]) -> Allowance:
    """The allowance of a real change's difference to the baseline at the end of the budget."""
    if is_control_arm(name):
        return NO_ALLOWANCE
    own, base = ([run for run in ended if run.variant == variant] for variant in (name, BASELINE))
    return of_time(own, base)


def ended_runs(report: Report) -> list[Run]:
    """The counted runs that ended their schedule; of a variant that has none, those that were cut."""
    ended = [run for run in report.runs if run.used and run.name not in report.cut]
    known = {run.variant for run in ended}
    return [run for run in report.runs if run.used and (run in ended or run.variant not in known)]


def _learned(used: list[Run]) -> dict[str, dict[str, list[float]]]:
    """Alternation probabilities a layer, mean over seeds, at the first and the last evaluation."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in dict.fromkeys(run.variant for run in used):
        learned = [run.record["learned"] for run in used if run.variant == name]
        histories = [[row[1] for row in seen.get("history", [])] for seen in learned if seen]
        histories = [history for history in histories if history]
        if histories:
            found[name] = {
                moment: [
                    mean(layer) for layer in zip(*(history[place] for history in histories), strict=True)
                ]
                for moment, place in (("first", 0), ("last", -1))
            }
    return found


def _plan(path: Path) -> dict[str, Any]:
    """The budget and the notes of a plan file; empty if it has none."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = None
    plan = plan if isinstance(plan, dict) else {}
    budget, notes = plan.get("budget"), plan.get("notes")
    told = [str(note) for note in notes] if isinstance(notes, list) else []
    return {"budget": budget if isinstance(budget, dict) else {}, "notes": [*told_margin(plan), *told]}


def _notes(planned: list[str], used: list[Run]) -> list[str]:
    """Where the numbers come from, then what the plan and the runs noted, each once."""
    own = [f"{run.name}: {note}" for run in used for note in run.record.get("notes", [])]
    others = left_out([run.record for run in used])
    return list(dict.fromkeys([*provenance(used), *others, *planned, *own]))


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data, perplexities beside the losses; the runs' own records are left where they are."""
    bare = [dataclasses.replace(run, record={}) for run in report.runs]
    value = dataclasses.asdict(dataclasses.replace(report, runs=bare))
    for run in value["runs"]:
        del run["record"]
    for row in value["rows"]:
        for key in ("final_loss", "best_loss", "equal_tokens_loss"):
            row[key.replace("loss", "perplexity")] = row[key] and {
                part: None if row[key][part] is None else math.exp(min(row[key][part], 700.0))
                for part in ("mean", "low", "high")
            }
    return {"schema": 1} | value

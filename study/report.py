"""The numbers of a study's report, from its records alone; `study.render` puts them into words.

Needs no torch. Runs that are missing, unfinished, unreadable or not comparable are named and never averaged.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2 import record
from ra.names import PATTERNS
from study.statistics import (
    AgainstFloor,
    Interval,
    NoiseFloor,
    against_floor,
    holm,
    mean,
    mean_interval,
    noise_floor,
    pooled_proportion,
)

BASELINE = "B"
CHANCE = 0.25  # four endings


@dataclass
class Run:
    """A run as the report lists it. used: whether its numbers count; why_not says otherwise."""

    name: str
    variant: str
    seed: int | None
    status: str
    used: bool
    why_not: str = ""
    record: dict[str, Any] | None = field(default=None, repr=False)


@dataclass
class HellaSwagScore:
    """Mean accuracy over the runs that have one; the standard error is that of the items."""

    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    items: int
    near_chance: bool
    absent: str


@dataclass
class Row:
    """One variant. Losses in nats; perplexities are their exponentials; intervals are 95 %."""

    variant: str
    equivalent: bool
    seeds: list[int]
    final_loss: Interval
    best_loss: Interval
    equal_tokens_loss: Interval | None
    against_baseline: Interval | None  # paired by seed, final losses
    against_baseline_equal_tokens: Interval | None
    hellaswag: HellaSwagScore
    iterations: float
    tokens: float
    train_seconds: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_bytes: int
    cut: int  # runs whose schedule was cut


@dataclass
class Judged:
    """A variant that is a real change, against the mean of the equivalent arms at the same seeds."""

    variant: str
    result: AgainstFloor
    adjusted_p: float


@dataclass
class Report:
    study: str
    runs: list[Run]
    rows: list[Row]
    floor: NoiseFloor | None
    judged: list[Judged]
    equal_tokens: int | None
    learned: dict[str, dict[str, list[float]]]  # variant -> {"first": [p a layer], "last": [...]}
    effective_batch: int | None
    block_size: int | None
    target: dict[str, Any] | None
    notes: list[str]


def is_equivalent(variant: str) -> bool:
    """Whether the variant is the baseline's function class with its weights renamed."""
    return variant.startswith("RA:") or PATTERNS.get(variant) is not None


def read_runs(study_dir: Path) -> list[Run]:
    """Every run that is there or was expected, with the reason where its numbers do not count."""
    runs = []
    for folder in sorted((study_dir / "runs").glob("*")) if (study_dir / "runs").is_dir() else []:
        try:
            seen = record.load(folder)
        except record.RecordError as error:
            runs.append(Run(folder.name, "?", None, "unreadable", False, str(error)))
            continue
        status = str(seen["status"])
        reason = "" if status == "finished" else (seen["error"] or f"its status is {status}")
        if not reason and not seen["validation"]["history"]:
            reason = "it has no validation result"
        runs.append(Run(folder.name, seen["variant"], seen["seed"], status, not reason, reason, seen))
    runs += _missing(study_dir, {run.name for run in runs})
    _refuse_other_experiments(runs)
    order = {name: place for place, name in enumerate([*PATTERNS])}
    runs.sort(key=lambda run: (-1 if run.seed is None else run.seed, order.get(run.variant, 99), run.name))
    return runs


def _missing(study_dir: Path, present: set[str]) -> list[Run]:
    try:
        expected = json.loads((study_dir / "expected.json").read_text())
        wanted = [
            (str(name), seed) for seed in range(int(expected["seeds"])) for name in expected["variants"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [
        Run(record.run_name(name, seed), name, seed, "missing", False, "it has not been run")
        for name, seed in wanted
        if record.run_name(name, seed) not in present
    ]


def _refuse_other_experiments(runs: list[Run]) -> None:
    """A run whose fingerprint differs from the majority's (at its seed for what depends on the seed) is set aside."""
    for entry in ("model", "data", "tokenizer", "batch", "schedule", "validation", "initial_weights"):
        groups: dict[Any, list[Run]] = {}
        for run in runs:
            if run.used and run.record:
                groups.setdefault(run.seed if entry == "initial_weights" else None, []).append(run)
        for members in groups.values():
            seen = Counter((run.record or {})["fingerprint"][entry] for run in members)
            usual = seen.most_common(1)[0][0]
            for run in members:
                if (run.record or {})["fingerprint"][entry] != usual:
                    run.used = False
                    run.why_not = f"another experiment: its fingerprint differs in {entry}"


def loss_at(seen: dict[str, Any], tokens: int) -> float | None:
    """The validation loss that was measured at exactly so many tokens."""
    return next((loss for at, _, loss in seen["validation"]["history"] if at == tokens), None)


def common_tokens(runs: list[Run]) -> int | None:
    """The largest number of tokens at which every run was evaluated."""
    grids = [{row[0] for row in run.record["validation"]["history"]} for run in runs if run.record]
    shared = set.intersection(*grids) if grids else set()
    return max(shared) if shared else None


def paired(losses: dict[str, dict[int, float]], variant: str) -> Interval | None:
    """The variant minus the baseline at the seeds that both have."""
    base, own = losses.get(BASELINE, {}), losses[variant]
    differences = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
    return mean_interval(differences) if differences and variant != BASELINE else None


def build(study_dir: Path) -> Report:
    """Everything that the report says, as numbers."""
    runs = read_runs(study_dir)
    used = [run for run in runs if run.used]
    variants = list(dict.fromkeys(run.variant for run in used))
    variants.sort(key=lambda name: list(PATTERNS).index(name) if name in PATTERNS else len(PATTERNS))
    tokens = common_tokens(used)
    final = {name: _by_seed(used, name, lambda seen: seen["validation"]["loss"]) for name in variants}
    level = {name: _by_seed(used, name, lambda seen: loss_at(seen, tokens or -1)) for name in variants}
    rows = [_row(name, [run.record for run in used if run.variant == name and run.record], final, level)
            for name in variants]  # fmt: skip
    arms = [name for name in variants if is_equivalent(name)]
    by_seed = [
        [final[n][seed] for n in arms if seed in final[n]] for seed in sorted({r.seed or 0 for r in used})
    ]
    first = used[0].record if used else None
    return Report(
        study=study_dir.name,
        runs=runs,
        rows=rows,
        floor=noise_floor(by_seed),
        judged=_judge([name for name in variants if not is_equivalent(name)], arms, final),
        equal_tokens=tokens,
        learned=_learned(used),
        effective_batch=first["batch"]["effective"] if first else None,
        block_size=first["batch"]["block_size"] if first else None,
        target=first["target"] if first else None,
        notes=_notes(study_dir, used),
    )


def _by_seed(used: list[Run], name: str, value: Any) -> dict[int, float]:
    found = {run.seed: value(run.record) for run in used if run.variant == name}
    return {seed: loss for seed, loss in found.items() if seed is not None and loss is not None}


def _judge(changes: list[str], arms: list[str], final: dict[str, dict[int, float]]) -> list[Judged]:
    results = {}
    for name in changes:
        pairs = [
            (loss, [final[arm][seed] for arm in arms if seed in final[arm]])
            for seed, loss in final[name].items()
        ]
        result = against_floor(pairs)
        if result:
            results[name] = result
    adjusted = holm([result.p_value for result in results.values()])
    return [Judged(name, result, p) for (name, result), p in zip(results.items(), adjusted, strict=True)]


def _row(name: str, records: list[dict[str, Any]], final: dict[str, Any], level: dict[str, Any]) -> Row:
    speeds = [r["throughput"]["tokens_per_second"] for r in records if r["throughput"]["tokens_per_second"]]
    mfu = [r["throughput"]["mfu"] for r in records if r["throughput"]["mfu"]]
    best = [min(row[2] for row in r["validation"]["history"]) for r in records]
    return Row(
        variant=name,
        equivalent=is_equivalent(name),
        seeds=sorted(r["seed"] for r in records),
        final_loss=mean_interval(list(final[name].values())),
        best_loss=mean_interval(best),
        equal_tokens_loss=mean_interval(list(level[name].values())) if level[name] else None,
        against_baseline=paired(final, name),
        against_baseline_equal_tokens=paired(level, name),
        hellaswag=_hellaswag(records),
        iterations=mean([r["progress"]["iterations"] for r in records]),
        tokens=mean([r["progress"]["tokens"] for r in records]),
        train_seconds=mean([r["progress"]["train_seconds"] for r in records]),
        tokens_per_second=mean(speeds) if speeds else None,
        mfu=mean(mfu) if mfu else None,
        peak_memory_bytes=max(r["memory"]["peak_allocated_bytes"] for r in records),
        cut=sum(bool(r["schedule"] and r["schedule"]["cut"]) for r in records),
    )


def _hellaswag(records: list[dict[str, Any]]) -> HellaSwagScore:
    scores = [r["hellaswag"] for r in records if r["hellaswag"] and "acc" in r["hellaswag"]]
    if not scores or len({score["items"] for score in scores}) > 1:
        reasons = [r["hellaswag"]["absent"] for r in records if r["hellaswag"] and "absent" in r["hellaswag"]]
        reason = (
            "runs were scored on different numbers of items" if scores else (reasons or ["not asked for"])[0]
        )
        return HellaSwagScore(None, None, None, None, 0, False, reason)
    items = scores[0]["items"]
    acc, acc_error = pooled_proportion([score["acc"] for score in scores], items)
    norm, norm_error = pooled_proportion([score["acc_norm"] for score in scores], items)
    near = abs(acc - CHANCE) <= 2 * acc_error or abs(norm - CHANCE) <= 2 * norm_error
    return HellaSwagScore(acc, acc_error, norm, norm_error, items, near, "")


def _learned(used: list[Run]) -> dict[str, dict[str, list[float]]]:
    """Alternation probabilities a layer, mean over seeds, at the first and the last evaluation."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in dict.fromkeys(run.variant for run in used):
        histories = [run.record["learned"]["history"] for run in used
                     if run.variant == name and run.record and run.record["learned"]]  # fmt: skip
        if histories:
            found[name] = {
                moment: [
                    mean(layer) for layer in zip(*(history[place][1] for history in histories), strict=True)
                ]
                for moment, place in (("first", 0), ("last", -1))
            }
    return found


def _notes(study_dir: Path, used: list[Run]) -> list[str]:
    """What the plan and the runs noted, each once."""
    try:
        notes = [str(note) for note in json.loads((study_dir / "plan.json").read_text()).get("notes", [])]
    except (OSError, ValueError, AttributeError):
        notes = []
    for run in used:
        notes += [f"{run.name}: {note}" for note in (run.record or {}).get("notes", [])]
    return list(dict.fromkeys(notes))


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data; the runs' own records are left where they are."""
    value = dataclasses.asdict(report)
    for run in value["runs"]:
        del run["record"]
    for row in value["rows"]:
        for key in ("final_loss", "best_loss", "equal_tokens_loss"):
            if row[key]:
                row[key.replace("loss", "perplexity")] = math.exp(min(row[key]["mean"], 700.0))
    return {"schema": 1} | value


def write(study_dir: Path) -> Report:
    """Rebuild report.json and report.md from the records, each replaced at once."""
    from study.render import markdown

    report = build(study_dir)
    record.write_json(study_dir / "report.json", as_json(report))
    record.write_text(study_dir / "report.md", markdown(report))
    return report


def render_terminal(report: Report) -> str:
    """The table for the terminal."""
    from study.render import terminal

    return terminal(report)

"""The numbers of a study's report, from its records alone; `study.report.report_summary` puts them into words.
Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2 import tokenizer
from gpt2.clocks import UNEVEN_TIMES
from ra.arms import controls_of, parse_arm
from referee.verdict.design import MARGIN, Design
from referee.verdict.statistics import Interval, NoiseFloor, mean, mean_interval, noise_floor
from runtime.errors import UserError
from runtime.records import to_plain
from runtime.run_record import bits_per_byte
from study import plan_file
from study.analysis.designs import Sensitivity, seed_hours, sensitivities
from study.analysis.eval_set_results import EvalSetTable, eval_set_tables
from study.analysis.verdict import (
    ItemTest,
    Losses,
    TunedVerdicts,
    VarianceCheck,
    Verdict,
    control_losses,
    earlier_verdicts,
    item_tests,
    judge,
    judge_tuned,
    odd_controls,
    variance_check,
)
from study.curves import probabilities
from study.experiment import Experiment, finished_seeds, read_experiment
from study.hellaswag_scores import TASKS, EndingsScore, common_items, endings_score, left_out
from study.plan_file import Continued, Plan, PlanBudget
from study.runs import (
    BASELINE,
    DAMAGED,
    PENDING,
    UNREAD,
    UNREADABLE,
    CountedRuns,
    Run,
    damaged_expectations,
    final_values,
    provenance,
    read_runs,
    variant_order,
)
from study.step_timing import Speed, speeds
from study.tuned_rates import Choice, read_choice

MOST_DAMAGED = 8  # runs named on the first screen


@dataclass
class ArmRow:
    """One variant. Losses in nats; perplexities are their exponentials; intervals are 95 %.

    Final and best losses are of the runs that ended their schedule, None without one. control: B or a fixed pattern.
    """

    variant: str
    control: bool
    seeds: list[int]
    final_loss: Interval | None
    best_loss: Interval | None
    against_controls: Interval | None  # to the mean of the control arms of each seed, final losses
    hellaswag: EndingsScore
    choice: EndingsScore
    iterations: float
    tokens: float
    train_seconds: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_bytes: int | None
    parameters: int | None
    cut: int  # runs that CONFIG_GPT2_HARD_LIMIT cut short


@dataclass
class Report(CountedRuns):
    """cut: runs that were cut short and ended before the others: their final losses count in no number.

    equal_time: counts follow step times, so that a slower variant made fewer updates. floor: the noise of the control
    arms. odd_controls: control arms that differ from the others, which points to an error.
    """

    study: str
    experiment: Experiment
    runs: list[Run]
    rows: list[ArmRow]
    floor: NoiseFloor | None
    design: Design | None  # as plan.json has it
    looks: dict[str, tuple[int, ...]]  # judged arm -> planned numbers of seeds
    finished: dict[str, int]  # judged arm -> planned seeds at which every run that it needs counts
    verdicts: list[Verdict]
    earlier: list[Verdict]  # at the looks before the last
    speeds: list[Speed]
    sensitivities: list[Sensitivity]
    variance_check: VarianceCheck | None
    odd_controls: list[str]
    items: list[ItemTest]
    equal_time: bool
    learned: dict[str, dict[str, list[float]]]  # variant -> {"first": [p a layer], "last": [...]}
    budget: PlanBudget | None
    validation_tokens: int | None
    validation_bytes: int | None
    unit: str  # of a loss: a token of the tokenizer, in words
    notes: list[str]
    cut: list[str]
    damaged: list[str]  # sentences on files that do not agree, with their remedy
    eval_sets: list[EvalSetTable]  # of the runs that ended their schedule; no verdict uses them
    continues: Continued | None = None  # the shorter study that the runs continue
    choice: Choice | None = None  # of the learning rates, where they are tuned
    tuned: TunedVerdicts | None = None

    @property
    def first_seed(self) -> int:
        """The first of the planned seeds."""
        return self.design.seeds[0] if self.design else 0

    @property
    def reference(self) -> str:
        """What differences are to: the control arms, or the name of the only one."""
        arms = [row.variant for row in self.rows if row.control]
        return arms[0] if len(arms) == 1 else "control arms"

    def controls_of(self, name: str) -> list[str]:
        """The control arms with which the verdict on an arm compares it."""
        tuned = self.design.controls if self.design and self.tuned else ()
        return [one for one in tuned or controls_of(name, self.variants) if one in self.variants]

    @property
    def variants(self) -> list[str]:
        """The variants that have such a run, in the order of the rows."""
        return [row.variant for row in self.rows]


def build_report(study_dir: Path) -> Report:
    """Compute everything that the report says."""
    runs = read_runs(study_dir)
    plan, damage = _plan(study_dir)
    choice, unread = _choice(study_dir)
    used = [run for run in runs if run.used]
    variants = sorted({run.variant for run in used}, key=variant_order)
    first = used[0].record if used else None
    ends = {run.record.progress.tokens for run in used}
    short = [run for run in used if run.record.truncated] if len(ends) > 1 else []
    ended = [run for run in used if run not in short]
    final: dict[str, dict[int, float]] = {name: {} for name in variants} | final_values(ended)
    design, looks, finished = plan and plan.design, plan.looks if plan else {}, finished_seeds(plan, runs)
    tuned = judge_tuned(final, design, looks, finished) if design and design.choice else None
    if tuned:
        verdicts, earlier = tuned.best, tuned.earlier
    else:
        settings = (plan.margin, plan.primary, looks) if plan else (MARGIN, "", looks)
        first_seed = plan.first_seed if plan else 0
        verdicts = judge(final, *settings, finished, first_seed)
        earlier = earlier_verdicts(final, *settings, first_seed)
    own_controls = design.controls if design and tuned else ()
    controls = control_losses(final, controls=own_controls)
    floor, baseline = noise_floor(controls), next(iter(own_controls), BASELINE)
    items = {task.key: common_items(used, task) for task in TASKS}
    planned = Counter(run.variant for run in runs if run.used or run.status in PENDING)
    hours = seed_hours(used, plan.slots if plan and plan.slots else 1)
    moments = {
        found.variant: {"first": found.layers[0], "last": found.layers[-1]} for found in probabilities(used)
    }
    return Report(
        study=study_dir.resolve().name,
        experiment=read_experiment(study_dir, plan, used),
        runs=runs,
        rows=[
            _row(name, used, short, final, items, own_controls if name in (*looks, *own_controls) else ())
            for name in variants
        ],
        floor=floor,
        design=plan.design if plan else None,
        looks=looks,
        finished=finished,
        verdicts=verdicts,
        earlier=earlier,
        speeds=speeds(plan, verdicts, ended),
        sensitivities=sensitivities(
            verdicts, floor, len(controls), planned, max(map(len, controls), default=0), hours
        ),
        variance_check=variance_check(final, own_controls),
        odd_controls=odd_controls(final),
        items=[test for task in TASKS for test in item_tests(study_dir, ended, task, baseline)],
        equal_time=plan is not None and plan.budget.equal_time,
        learned=moments,
        budget=plan.budget if plan else None,
        validation_tokens=first.validation.tokens if first else None,
        validation_bytes=first.validation.bytes if first else None,
        unit=tokenizer.find(first.fingerprint.tokenizer if first else "").unit,
        notes=_notes([*damaged_expectations(study_dir), *(plan.notes if plan else ())], used),
        cut=[run.name for run in short],
        damaged=[*_damaged_runs(runs), *damage, *unread],
        eval_sets=eval_set_tables(ended),
        continues=plan.continues if plan else None,
        choice=choice if tuned else None,
        tuned=tuned,
    )


def _row(
    name: str,
    used: list[Run],
    short: list[Run],
    final: Losses,
    items: Mapping[str, str | None],
    controls: Sequence[str],
) -> ArmRow:
    """Summarize the runs that ended their schedule; without one, what does not depend on the end.

    controls: the control arms that it is compared with; (): those at its learning rate.
    """
    own = [run for run in used if run.variant == name]
    ended = [run for run in own if run not in short]
    shown = ended or own
    records = [run.record for run in shown]
    throughputs = [record.throughput for record in records if record.throughput]
    peaks = [record.memory.peak_allocated_bytes for record in records if record.memory]
    best = [min(run.values.values()) for run in ended]
    seeds = sorted(final[name])
    against = control_losses(final, seeds, name, controls)
    pairs = [(seed, arms) for seed, arms in zip(seeds, against, strict=True) if arms]
    alone = [*(controls or controls_of(name, final))] == [name]
    differences = [] if alone else [final[name][seed] - mean(arms) for seed, arms in pairs]
    return ArmRow(
        variant=name,
        control=parse_arm(name).is_control,
        seeds=sorted(run.record.seed for run in own),
        final_loss=mean_interval([run.value for run in ended]) if ended else None,
        best_loss=mean_interval(best) if ended else None,
        against_controls=mean_interval(differences) if differences else None,
        **{task.key: endings_score(shown, task, items[task.key]) for task in TASKS},
        iterations=mean([record.progress.iterations for record in records]),
        tokens=mean([record.progress.tokens for record in records]),
        train_seconds=mean([record.progress.train_seconds for record in records]),
        tokens_per_second=mean_of_known(one.tokens_per_second for one in throughputs),
        mfu=mean_of_known(one.mfu for one in throughputs),
        peak_memory_bytes=max((peak for peak in peaks if peak is not None), default=None),
        parameters=records[0].parameters,
        cut=sum(run.record.truncated for run in own),
    )


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without one."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def ended_runs(report: Report) -> list[Run]:
    """The counted runs that ended their schedule; of a variant that has none, those that were cut."""
    known = {run.variant for run in report.used if run.name not in report.cut}
    return [run for run in report.used if run.name not in report.cut or run.variant not in known]


def bits(report: Report, loss: Interval | None) -> Interval | None:
    """Convert a validation loss to bits per byte; None without a counted run."""
    if loss is None or not report.validation_tokens or not report.validation_bytes:
        return None
    mean, low, high = (
        bits_per_byte(end, report.validation_tokens, report.validation_bytes)
        for end in (loss.mean, loss.low, loss.high)
    )
    return None if mean is None else dataclasses.replace(loss, mean=mean, low=low, high=high)


def _plan(study_dir: Path) -> tuple[Plan | None, list[str]]:
    """Read the study's plan, or return why it cannot be read."""
    try:
        return plan_file.read_begun(study_dir), []
    except plan_file.PlanFileError as error:
        return None, [f"The budget and the equivalence margin of the plan are not used: {error}"]


def _choice(study_dir: Path) -> tuple[Choice | None, list[str]]:
    """Read the choice of learning rates, or return why it cannot be read."""
    try:
        return read_choice(study_dir), []
    except UserError as error:
        return None, [f"The choice of learning rates is not shown: {error}"]


def _damaged_runs(runs: list[Run]) -> list[str]:
    found = [run for run in runs if run.cause == DAMAGED or run.status == UNREADABLE]
    lines = [f"{run.name} counts in no mean and no verdict: {run.why_not}" for run in found[:MOST_DAMAGED]]
    more = len(found) - MOST_DAMAGED
    return [*lines, f"{more} more runs are damaged: see Runs"] if more > 0 else lines


def _notes(planned: list[str], used: list[Run]) -> list[str]:
    """Provenance first, then the notes of the plan and of the runs, each once."""
    found = [(run.name, note) for run in used for note in run.record.notes]
    own = [f"{name}: {note}" for name, note in found if not note.startswith(UNEVEN_TIMES)]
    uneven = ", ".join(name for name, note in found if note.startswith(UNEVEN_TIMES))
    if uneven:
        own.append(
            f"{UNEVEN_TIMES}, as on a busy machine; losses are unaffected; ignore the speed of {uneven}"
        )
    others = [note for task in TASKS for note in left_out(used, task)]
    return list(dict.fromkeys([*provenance(used), *others, *planned, *own]))


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain data, with perplexities beside the losses.

    Of a run that counts it has the validation losses in nats: [tokens, loss] of each evaluation.
    """
    bare = [dataclasses.replace(run, record=UNREAD, rows=()) for run in report.runs]
    value: dict[str, Any] = to_plain(dataclasses.replace(report, runs=bare))
    for run, source in zip(value["runs"], report.runs, strict=True):
        del run["record"], run["rows"]
        run["losses"] = [[tokens, loss] for tokens, loss in source.values.items()]
    for row in value["rows"]:
        for key in ("final_loss", "best_loss"):
            row[key.replace("loss", "perplexity")] = row[key] and {
                part: None if row[key][part] is None else math.exp(min(row[key][part], 700.0))
                for part in ("mean", "low", "high")
            }
    for row, own in zip(value["rows"], report.rows, strict=True):
        found = bits(report, own.final_loss)
        row["bits_per_byte"] = found and {part: getattr(found, part) for part in ("mean", "low", "high")}
    value["budget"] = value["budget"] or {}
    value["experiment"]["text"] = report.experiment.text
    if report.tuned is None:
        del value["tuned"], value["choice"]
    if not report.eval_sets:
        del value["eval_sets"]
    return {"schema": 1} | value

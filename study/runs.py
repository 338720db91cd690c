"""Read the runs of a study: which exist, which count, and why the others do not.

Needs no torch. Runs that are missing, unfinished, unreadable, damaged or not comparable are named and never averaged.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from msgspec import Meta

from ra.arms import PATTERNS, parse_arm
from referee.verdict.rows import ACCURACY, LOSS, TEST, VALIDATION, Row
from runtime import records, run_record
from runtime.files import DamagedFileError, Remembered
from runtime.metrics_log import LogReader, MetricsLine, parse_line
from runtime.records import Count, Record, Task, Text
from runtime.run_record import (
    Batch,
    Environment,
    Fingerprint,
    Progress,
    RecordedTarget,
    RecordedValidation,
    RunRecord,
    Schedule,
)


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run; None where it is missing or damaged."""
    try:
        return run_record.load(run_dir)
    except run_record.RecordError:
        return None


def read_records(study_dir: Path) -> dict[Path, RunRecord]:
    """Return folder -> record of each run that has a readable one, in the order of the names."""
    found = {folder: read_record(folder) for folder in sorted((study_dir / "runs").glob("*/"))}
    return {folder: record for folder, record in found.items() if record}


def task_of(study_dir: Path) -> Task:
    """Return the task of a study: that of its first readable record, "gpt2" without one."""
    found = map(read_record, sorted((study_dir / "runs").glob("*/")))
    return next((record.task for record in found if record), "gpt2")


def module(
    name: Literal["grpo.train", "grpo.gsm8k", "study.grpo_page", "study.evaluation.grpo_platforms"],
) -> Any:
    """Import a module of the task "grpo": a study of GPT-2 loads none of them."""
    return importlib.import_module(name)


REMEDY = "fix: restore the files from a copy, or delete the run's folder and run `make`"


class FinishedRecord(RunRecord, frozen=True):
    """A record whose results count: these parts are known. A type for readers; `load` returns RunRecord."""

    fingerprint: Fingerprint
    target: RecordedTarget
    batch: Batch
    progress: Progress
    validation: RecordedValidation
    environment: Environment
    schedule: Schedule


BASELINE = "B"
EXPECTED = "expected.json"
CONTINUE = "fix: restore the file from a copy, or run `make`, which continues the run from its checkpoint"
DAMAGED = "damaged"  # cause of a run whose files do not agree
DIVERGED = "diverged"  # cause of a run that ended because its loss or gradient is not finite
DIVERGENCES = ("NotFiniteError", "DivergedError")  # start of the error of such a run
PENDING = ("missing", "interrupted", "running")  # statuses of runs that a study still has to finish
UNREADABLE = "unreadable"  # status of a run whose run.json is missing, damaged or altered
# of a finished record; that of GRPO lacks the first
PARTS = ("validation", "progress", "fingerprint", "batch", "target", "environment", "schedule")
METRICS = {"gpt2": (VALIDATION, LOSS), "grpo": (TEST, ACCURACY)}  # task -> data and metric of a verdict
# of every run; initial weights: at each seed
SHARED = ("model", "data", "tokenizer", "batch", "schedule", "validation", "numbers", "numerics_fix")
# the record of a run whose run.json is missing or unreadable
UNREAD = cast("FinishedRecord", run_record.blank("?", "?", 0))


class Expected(Record, frozen=True):
    """The content of expected.json: every variant at every seed is a run of the study."""

    variants: tuple[Text, ...]
    seeds: Annotated[int, Meta(ge=0, le=1000)]
    first_seed: Count = 0

    @property
    def all_runs(self) -> list[tuple[str, int]]:
        """(variant, seed) of every run."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [(name, seed) for seed in seeds for name in self.variants]


@dataclass
class Run:
    """One run of the report. used: whether its numbers count; why_not: the reason if they do not.

    cause: the reason in a few words, where the status does not give it.
    record: complete if the run is used; UNREAD if run.json is missing or unreadable. rows: of a run that is used.
    """

    name: str
    variant: str
    seed: int | None
    status: str
    used: bool
    why_not: str = ""
    record: FinishedRecord = field(default=UNREAD, repr=False)
    cause: str = ""
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @cached_property
    def _series(self) -> dict[tuple[str, str], dict[int, Row]]:
        """The rows, in the order of the table, by the data set and the metric, then by the tokens."""
        found: dict[tuple[str, str], dict[int, Row]] = {}
        for row in self.rows:
            found.setdefault((row.dataset, row.metric), {})[row.tokens] = row
        return found

    def series(self, dataset: str, metric: str) -> dict[int, Row]:
        """Return tokens -> row of a metric on a data set, in the order of the table."""
        return self._series.get((dataset, metric), {})

    @cached_property
    def values(self) -> dict[int, float]:
        """Tokens -> value of the task's metric (METRICS: validation loss in nats, accuracy) at every evaluation."""
        return {tokens: row.value for tokens, row in self.series(*METRICS[self.record.task]).items()}

    @property
    def value(self) -> float:
        """The value of the task's metric at the end of a run that is used: what is judged."""
        return self.values[self.record.progress.tokens]

    def file(self, study_dir: Path, name: str) -> Path:
        """Return the path of a result file of the run, such as metrics.jsonl."""
        return study_dir / "runs" / self.name / name


def read_runs(study_dir: Path) -> list[Run]:
    """Every existing or expected run, with the reason if its numbers do not count."""
    folder = study_dir / "runs"
    names = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    runs = [copy.copy(_remembered.get(path, _read_files(path), partial(_read, path))) for path in names]
    runs += _missing(study_dir, {run.name for run in runs})
    _refuse_other_experiments(runs)
    runs.sort(key=lambda run: (-1 if run.seed is None else run.seed, variant_order(run.variant), run.name))
    return runs


def variant_order(name: str) -> tuple[int, str]:
    """The sort key of variants: the built-in ones as the project lists them, then the others by name."""
    attention = parse_arm(name).attention
    return list(PATTERNS).index(attention) if attention in PATTERNS else len(PATTERNS), name


_remembered: Remembered[Run] = Remembered()  # the driver writes a report after each run


def _read_files(folder: Path) -> list[str]:
    """Return the files of a run from which its results are read or that SHA256SUMS lists."""
    return ["run.json", records.SUMS, *run_record.side_files(folder)]


def _read(folder: Path) -> Run:
    try:
        record = run_record.load(folder)
    except run_record.RecordError as error:
        return Run(folder.name, "?", None, UNREADABLE, False, f"{error}; {CONTINUE}")
    cause, reason = _why_not(record, folder.name)
    complete = cast("FinishedRecord", record)
    run = Run(folder.name, record.variant, record.seed, record.status, not reason, reason, complete, cause)
    if run.used:
        found = run_record.altered(complete, folder, weights=False)  # who loads the model reads it
        try:
            run.rows = () if found else run_record.read_rows(folder, record)
        except DamagedFileError as error:
            found = [str(error)]
        if found:
            run.used, run.cause, run.why_not = False, DAMAGED, f"{'; '.join(found)}; {REMEDY}"
        elif complete.progress.tokens not in run.values:
            metric = " ".join(METRICS[complete.task])
            run.used, run.cause, run.why_not = False, "no finite result", f"it has no finite {metric}"
    return run


def _why_not(record: RunRecord, name: str) -> tuple[str, str]:
    """Return the cause and the reason why the numbers of a record in folder `name` do not count; "" if they do."""
    if record.run != name or run_record.run_name(record.variant, record.seed) != name:
        owner = f"{record.run} ({record.variant}, seed {record.seed})"
        return "record of another run", f"its record is that of {owner}, not of this folder"
    if diverged(record.status, record.error):
        return DIVERGED, f"it diverged: {record.error}"
    if record.status != "finished":
        return "", record.error or f"it is {record.status}"
    unknown = [name for name in PARTS[record.task == "grpo" :] if getattr(record, name) is None]
    if unknown:
        return "incomplete record", f"its record says finished but has no {', '.join(unknown)}"
    faults = record.admission.faults if record.admission else ()
    if faults:
        return "not admitted", f"its trained model fails the check {faults[0].check}: {faults[0].message}"
    points = [record.learned.alternation_probability] if record.learned else []
    points += [point.probability for point in (record.learned and record.learned.history) or ()]
    layers = sorted({len(point) for point in points})
    if len(layers) > 1:
        return "damaged record", f"its learned probabilities are of different numbers of layers: {layers}"
    return "", ""


def diverged(status: str, error: str | None) -> bool:
    """Return whether a run failed because its loss or gradient is not finite, so that a repetition fails again."""
    return status == "failed" and (error or "").startswith(DIVERGENCES)


def diverged_seeds(runs: list[Run]) -> dict[str, list[int]]:
    """Return variant -> seeds of its diverged runs, for variants with one."""
    found: dict[str, list[int]] = {}
    for run in runs:
        if run.cause == DIVERGED and run.seed is not None:
            found.setdefault(run.variant, []).append(run.seed)
    return found


class CountedRuns:
    """What the reports of both tasks say of their runs."""

    runs: list[Run]

    @property
    def used(self) -> list[Run]:
        """The runs that count."""
        return [run for run in self.runs if run.used]

    @property
    def uncounted(self) -> list[Run]:
        """The runs that do not count; pending ones are not among them."""
        return [run for run in self.runs if not run.used and run.status not in PENDING]

    @property
    def pending(self) -> int:
        """The number of runs that the study still has to finish."""
        return sum(run.status in PENDING for run in self.runs)


def final_values(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Return variant -> seed -> final value of the task's metric, of runs that count."""
    table: dict[str, dict[int, float]] = {}
    for run in runs:
        table.setdefault(run.variant, {})[run.record.seed] = run.value
    return table


def to_baseline(run_dir: Path, record: RunRecord) -> str:
    """Return the difference of a run to B at its seed and rate, at the last tokens at which both were validated.

    In percent of perplexity, of GRPO in points of accuracy; "" without such tokens.
    """
    baseline = parse_arm(BASELINE).with_rate(parse_arm(record.variant).rate).name
    if record.variant == baseline:
        return ""
    other = run_dir.parent / run_record.run_name(baseline, record.seed)
    values, references = validations(run_dir, record), validations(other, read_record(other))
    shared = values.keys() & references.keys()
    if not shared:
        return ""
    from referee.verdict.statistics import percent  # loads scipy, which a run does not need

    difference = values[max(shared)] - references[max(shared)]
    return f"{100 * difference:+.1f} points" if record.task == "grpo" else percent(difference)


def validations(run_dir: Path, record: RunRecord | None) -> dict[int, float]:
    """Return tokens -> loss in nats, of GRPO accuracy, of every validation so far."""
    if record and record.status == "finished" and record.validation:
        return {at.tokens: at.loss for at in record.validation.history if at.loss is not None}
    texts = LogReader(run_dir / "metrics.jsonl").read()
    lines = [parse_line(text, MetricsLine) for text in texts if b'"validation"' in text]
    values = [(line.tokens, line.loss if line.accuracy is None else line.accuracy) for line in lines if line]
    return {tokens: value for tokens, value in values if value is not None}


def read_expected(study_dir: Path) -> Expected:
    """Return what the study is configured for; no seed and no variant where it is not recorded."""
    try:
        return records.read(Expected, study_dir / EXPECTED)
    except (FileNotFoundError, DamagedFileError):  # damaged_expectations names a damaged one
        return Expected((), 0)


def run_folders(study_dir: Path) -> tuple[list[Path], list[str]]:
    """Return the folders in runs/ with a record or the name of an expected run, and the names of the others."""
    expected = {run_record.run_name(name, seed) for name, seed in read_expected(study_dir).all_runs}
    folders = sorted((study_dir / "runs").glob("*/"))
    runs = [folder for folder in folders if folder.name in expected or (folder / "run.json").exists()]
    return runs, [folder.name for folder in folders if folder not in runs]


def damaged_expectations(study_dir: Path) -> list[str]:
    """Return a note where expected.json is damaged."""
    try:
        records.read(Expected, study_dir / EXPECTED)
    except FileNotFoundError:
        pass
    except DamagedFileError as error:
        return [f"{error}; runs that have not started are not listed; fix: run `make`, which writes the file"]
    return []


def _missing(study_dir: Path, present: set[str]) -> list[Run]:
    return [
        Run(run_record.run_name(name, seed), name, seed, "missing", False, "it has not been run")
        for name, seed in read_expected(study_dir).all_runs
        if run_record.run_name(name, seed) not in present
    ]


def _refuse_other_experiments(runs: list[Run]) -> None:
    """Exclude the runs whose fingerprint is not the majority's (at its seed for the initial weights)."""
    _refuse([run for run in runs if run.used], SHARED, "")
    for seed in {run.seed for run in runs if run.used}:
        members = [run for run in runs if run.used and run.seed == seed]
        _refuse(members, ("initial_weights",), f" of seed {seed}")


def _refuse(runs: list[Run], entries: tuple[str, ...], of: str) -> None:
    """Exclude runs with another fingerprint than most runs, or than the baseline where no fingerprint has the most."""
    prints = {run.name: tuple(getattr(run.record.fingerprint, entry) for entry in entries) for run in runs}
    count = Counter(prints.values())
    with_baseline = {prints[run.name] for run in runs if run.variant == BASELINE}
    usual = max(count, key=lambda seen: (count[seen], seen in with_baseline), default=())
    for run in runs:
        pairs = zip(entries, prints[run.name], usual, strict=True)
        differing = [entry for entry, own, other in pairs if own != other]
        if differing:
            run.used, run.cause = False, "not comparable"
            tie = list(count.values()).count(count[usual]) > 1
            others = f"{'the baseline' if tie else 'most runs'}{of}"
            run.why_not = (
                f"not comparable: its fingerprint differs in {', '.join(differing)} from that of {others}"
            )


def provenance(runs: list[Run]) -> list[str]:
    """Notes on the origin of the numbers: commits, changes, devices that differ."""
    said = []
    commits = Counter(str(run.record.commit)[:12] for run in runs)
    if len(commits) > 1:
        listed = ", ".join(f"{commit} ({count})" for commit, count in commits.most_common())
        said.append(f"The runs come from different commits: {listed}.")
    dirty = [run.name for run in runs if run.record.dirty]
    if dirty:
        said.append(f"{len(dirty)} of {len(runs)} runs had uncommitted changes in the repository.")
    machines = Counter(f"{run.record.target.device}, {run.record.target.dtype}" for run in runs).most_common()
    if len(machines) > 1:
        listed = "; ".join(f"{name} ({count})" for name, count in machines)
        said.append(
            f"The runs come from different devices: {listed}. Times, speeds and memory are mixed means."
        )
    return said


class RunList:
    """The runs of one configuration, ordered by seed, so that each finished seed compares all variants."""

    def __init__(self, directory: Path, variants: tuple[str, ...], seeds: range) -> None:
        self.directory, self.variants, self.seeds = directory, variants, seeds

    def all(self) -> list[tuple[str, int]]:
        """Return every (variant, seed)."""
        return [(name, seed) for seed in self.seeds for name in self.variants]

    def folder(self, name: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.directory / "runs" / run_record.run_name(name, seed)

    def status(self, name: str, seed: int) -> str:
        """Return the recorded status, or "missing"."""
        record = read_record(self.folder(name, seed))
        return record.status if record else "missing"

    def pending(self) -> list[tuple[str, int]]:
        """Return the runs that `make` still has to execute."""
        return [run for run in self.all() if self.status(*run) != "finished"]

    def write_expected(self) -> None:
        """Record the configured runs for the report."""
        expected = Expected(self.variants, len(self.seeds), self.seeds.start)
        if read_expected(self.directory) != expected:
            records.write(self.directory / EXPECTED, expected, self.directory.name)

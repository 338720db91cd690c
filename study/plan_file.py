"""plan.json: the counts, the batch and the step times of a study, as frozen dataclasses. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from referee.verdict.design import MARGIN, Design
from runtime import records
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import Symbols
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.records import Amount, Count, InvalidJsonError, Positive, Record, Task, Text, parse
from runtime.run_record import RecordedTarget
from runtime.settings import Config

FILE = "plan.json"
RESTORE = "fix: restore it from a copy, or set another CONFIG_STUDY_NAME"


ALTERED = "the design in plan.json does not have its SHA-256, so it was changed after the plan"

Seconds = Annotated[float, Meta(ge=1e-9, le=1e9)]  # of one step
Ratio = Annotated[float, Meta(ge=1e-6, le=1e6)]


class PlanFileError(UserError, RuntimeError):
    """plan.json is not a plan."""


class PlanBudget(Record, frozen=True):
    """Limits of one run; 0 means no limit. equal_time: counts follow the ratio of step times."""

    max_time_seconds: Amount
    max_tokens: Amount
    max_iterations: Amount
    hard_limit_seconds: Amount = 0
    equal_time: bool = False


class CostClass(Record, frozen=True):
    """Variants whose steps cost the same. samples: seconds of each timed step. peak_bytes: None where not measured."""

    seconds_per_iteration: Seconds
    samples: tuple[Seconds, ...] = ()
    peak_bytes: Count | None = None


class StepTimeRatio(Record, frozen=True):
    """Step time of a cost class over that of class `to`, with its 95 % interval (None where it is unknown)."""

    to: str
    ratio: Ratio
    low: Ratio | None = None
    high: Ratio | None = None


class PlanRow(Record, frozen=True):
    """The runs of one variant. warmup_iterations: of "wsd" alone."""

    cost_class: str = field(name="class")
    iterations: Positive
    tokens: Positive
    predicted_bytes: Count | None = None
    warmup_iterations: Count | None = None


class Continued(Record, frozen=True):
    """The shorter study that the runs continue, as it was when this study was planned."""

    study: Text  # its folder
    schedule: Text  # of the fingerprint of its runs
    verdicts: tuple[Text, ...]  # sentences
    iterations: Mapping[str, Positive] = field(default_factory=dict)  # arm -> of its runs


class Plan(Record, kw_only=True, frozen=True):
    """The content of plan.json.

    design: None before it is written. added: arm that was added after the first run -> planned seeds at that time.
    later_looks: numbers of seeds to which CONFIG_SEEDS was raised.
    continues: None where the runs begin at the first iteration. threads: of a run on a CPU of this machine; the numbers
    depend on them. slots: runs at once in the last `make` on this machine.
    """

    schema: Literal[1] = 1
    task: Task = "gpt2"
    study: str = ""
    created: str = ""
    config_sha256: str = ""
    target: RecordedTarget | None = None
    batch: BatchPlan
    budget: PlanBudget
    classes: Mapping[str, CostClass] = field(default_factory=dict)
    step_time_ratios: Mapping[str, StepTimeRatio] = field(default_factory=dict)
    variants: Mapping[str, PlanRow]
    notes: tuple[str, ...] = ()
    design: Design | None = None
    added: Mapping[str, Positive] = field(default_factory=dict)
    later_looks: tuple[Positive, ...] = ()
    continues: Continued | None = None
    threads: Positive | None = None
    slots: Positive | None = None

    def __post_init__(self) -> None:
        for name, row in self.variants.items():
            expected = row.iterations * self.batch.tokens
            if row.tokens != expected:
                raise InvalidJsonError(f"{name} has {row.tokens} tokens; its iterations have {expected}")

    @property
    def counts(self) -> str:
        """The distinct iterations of the variants, as in "10, 12"."""
        return ", ".join(
            str(count) for count in dict.fromkeys(row.iterations for row in self.variants.values())
        )

    @property
    def margin(self) -> float:
        """The margin of equivalence in nats."""
        return self.design.margin if self.design else MARGIN

    @property
    def primary(self) -> str:
        """The arm of the primary comparison; "" without one."""
        return self.design.primary if self.design else ""

    @property
    def first_seed(self) -> int:
        """The first seed of the design."""
        return self.design.seeds[0] if self.design else 0

    @property
    def looks(self) -> dict[str, tuple[int, ...]]:
        """Judged arm -> its numbers of seeds, ascending: of older studies, planned, raised. The last one decides."""
        if self.design is None:
            return {}
        first = self.design.looks[0]
        earlier = tuple(seeds for seeds in self.design.earlier_looks if seeds < first)
        planned = dict.fromkeys(self.design.arms, (*earlier, *self.design.looks))
        planned |= {name: (seeds,) for name, seeds in self.added.items()}
        return {
            name: (*looks, *(seeds for seeds in self.later_looks if seeds > looks[-1]))
            for name, looks in planned.items()
        }

    def planned_seconds(self, variant: str) -> float | None:
        """Training seconds of one run of the variant; None where no step of its class was timed."""
        row = self.variants[variant]
        timed = self.classes.get(row.cost_class)
        return row.iterations * timed.seconds_per_iteration if timed else None


def read(study_dir: Path) -> Plan | None:
    """Read the study's plan. None where there is none; PlanFileError where the file is not a plan."""
    path = study_dir / FILE
    try:
        return from_json(records.read_plain(path))
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        raise PlanFileError(f"{error}; {RESTORE}") from error
    except InvalidJsonError as error:
        raise PlanFileError(f"{path} cannot be read: {error}; {RESTORE}") from error


def read_begun(study_dir: Path) -> Plan | None:
    """Read a plan like `read`. PlanFileError also where the study has runs and no plan."""
    plan = read(study_dir)
    if plan is None and any(study_dir.glob("runs/*/run.json")):
        raise PlanFileError(f"{study_dir / FILE} is missing, and the study has runs; {RESTORE}")
    return plan


def read_valid(study_dir: Path) -> Plan | None:
    """Read a plan like `read`; None also where the file is not a plan."""
    try:
        return read(study_dir)
    except PlanFileError:
        return None


def read_config(symbols: Symbols, study_dir: Path) -> Config:
    """Return the configuration. CONFIG_CPU_THREADS=0: with the threads of the study's plan, where it has any.

    Several ranks have their own.
    """
    config, plan = Config.from_symbols(symbols), read_valid(study_dir)
    if symbols.integer("CPU_THREADS") or config.target.ranks > 1 or plan is None or plan.threads is None:
        return config
    return replace(config, target=replace(config.target, cpu_threads=plan.threads))


def write(study_dir: Path, plan: Plan) -> Plan:
    """Write plan.json atomically."""
    records.write(study_dir / FILE, plan, plan.study)
    return plan


def from_json(content: Any) -> Plan:
    """Return the plan in the content of plan.json. InvalidJsonError names the first part that is not a plan's."""
    return parse(Plan, content, "plan")

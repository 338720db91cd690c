"""The settings of a monitor, and the config.json of msProbe's TrainerMon, which has them in its own words."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LOSS, NORM, Outlier
from referee.numerics.monitor.monitor_tables import STEPS_PER_FILE
from referee.numerics.monitor.targets import (
    STATISTICS,
    ModelNames,
    MonitorTarget,
    parse_targets,
    parse_triggers,
    plain_name,
)
from referee.numerics.text_files import read_dump_json

SWITCHES = {  # of config.json -> group of targets
    "wg_distribution": "grad",
    "param_distribution": "param",
    "mv_distribution": "adam",
    "ur_distribution": "update",
    "attention_distribution": "attention",  # not msProbe's
}
# of msProbe, refused where they are switched on
REFUSED = (
    "cc_distribution", "alert", "append_output", "stack_info", "monitor_mbs_grad", "mg_direction",
    "recording_l2_features", "module_ranks", "all_xy", "print_struct",
)  # fmt: skip
IGNORED = ("eps", "squash_name", "sa_order")  # of msProbe; nothing here depends on them
TRIGGER_SIDES = ("input", "output", "input_grad", "output_grad")


class TrainerMonSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of config.json (docs/monitor.md)."""

    targets: dict[str, Any] = {}
    xy_distribution: bool = False
    forward_only: bool = False
    backward_only: bool = False
    wg_distribution: bool = False
    param_distribution: bool = False
    mv_distribution: bool = False
    ur_distribution: bool = False
    attention_distribution: bool = False
    ops: tuple[str, ...] = ("norm", "mean", "max", "min")
    ndigits: int = 6
    start_step: int = 0
    collect_times: int = 10**8
    step_interval: int = 1
    step_count_per_record: int = 1
    format: Literal["csv"] = "csv"
    dynamic_on: bool = False


@dataclass(frozen=True)
class MonitorConfig:
    """Which rows a monitor writes, and how."""

    targets: tuple[str, ...] = ("grad", "param")  # words of referee.numerics.monitor.monitor_settings
    interval: int = 10  # steps from one monitored step to the next
    start: int = 0  # the first monitored step
    times: int = 10**8  # monitored steps in all
    statistics: tuple[str, ...] = STATISTICS  # columns, some of tables.STATISTICS
    digits: int = 9  # significant ones of a value
    steps_per_file: int = STEPS_PER_FILE

    def __post_init__(self) -> None:
        parse_targets(self.targets)
        lowest = {"interval": 1, "start": 0, "times": 0, "digits": 1, "steps_per_file": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise NumericsError(f"{name} is {value!r}; fix: a whole number from {least}")
        if not self.statistics or not {*self.statistics} <= {*STATISTICS}:
            raise NumericsError(
                f"statistics are {list(self.statistics)}; fix: use some of {', '.join(STATISTICS)}"
            )


def read_settings(path: Path) -> TrainerMonSettings:
    """Return the keys of a config.json, with defaults. NumericsError names an entry that cannot be used."""
    content = read_dump_json(path, "correct it")
    try:
        for name in REFUSED if isinstance(content, dict) else ():
            value = content.get(name)
            if value.get("enable", value.get("rules")) if isinstance(value, dict) else value:
                raise NumericsError(f"{name} is not supported; fix: remove it")
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key not in (*REFUSED, *IGNORED)}
        settings = msgspec.convert(content, TrainerMonSettings)
        monitor_config(settings)
    except (NumericsError, msgspec.ValidationError) as error:
        fix = "" if isinstance(error, NumericsError) else "; fix: docs/monitor.md has the keys"
        raise NumericsError(f"{path}: {error}{fix}") from error
    return settings


def monitor_config(settings: TrainerMonSettings, names: ModelNames | None = None) -> MonitorConfig:
    """Return the monitor's configuration of a config.json. names: of the model."""
    groups = [group for switch, group in SWITCHES.items() if getattr(settings, switch)]
    if settings.xy_distribution:
        groups += ["actv"] * (not settings.backward_only) + ["actv_grad"] * (not settings.forward_only)
    ops = ["nan" if name == "nans" else name for name in settings.ops]
    return MonitorConfig(
        targets=tuple(f"{target}" for group in groups for target in _paths(group, settings, names)),
        interval=settings.step_interval,
        start=settings.start_step,
        times=settings.collect_times,
        statistics=tuple(sorted(ops, key=lambda name: [*STATISTICS, name].index(name))),
        digits=max(1, settings.ndigits),
        steps_per_file=settings.step_count_per_record,
    )


def check_targets(path: Path, settings: TrainerMonSettings, names: ModelNames) -> None:
    """NumericsError for an entry of `targets` that names no module and no parameter of the model."""
    for target in _paths("all", settings, names):
        problem = names.problem(target)
        if problem:
            raise NumericsError(f"{path}: targets: {problem.removeprefix('all:')}")


def _paths(group: str, settings: TrainerMonSettings, names: ModelNames | None = None) -> list[MonitorTarget]:
    """Return the targets of a group: all modules, or those that `targets` lists with their sides."""
    if not settings.targets:
        return [MonitorTarget(group)]
    found = []
    known = (*names.modules, *names.parameters) if names else ()
    for path, sides in settings.targets.items():
        path = re.sub(r"^[0-9]+:", "", path)
        path = path if path in known else plain_name(path)
        sides = sides if isinstance(sides, dict) else {}
        for side in sides:
            if side not in TRIGGER_SIDES:
                raise NumericsError(f"targets has {side!r} for {path}; fix: use {', '.join(TRIGGER_SIDES)}")
        mine = [side for side in sides if side.endswith("_grad") == (group == "actv_grad")]
        if group not in ("actv", "actv_grad") or not sides:
            found.append(MonitorTarget(group, path))
        for side in mine if group in ("actv", "actv_grad") else ():
            index = str(sides[side]).partition(":")[2] or "0"
            found.append(MonitorTarget(group, f"{path}.{side}.{index}".lstrip(".")))
    return found


QUANTITIES = {"spike": LOSS, "grad_norm": NORM}
TRIGGERED = "triggers.jsonl"  # of a run: {"step", "trigger", "reason", "checkpoint"}


@dataclass(frozen=True)
class Fired:
    """A trigger and its reason, at one step."""

    trigger: str
    step: int
    reason: str


class Triggers:
    """The rules of a run. `observe` every step in order; after a resume, also those before it."""

    def __init__(self, words: Sequence[str]) -> None:
        """words: NAME or NAME:K. NumericsError names one that cannot be used."""
        self.factors = parse_triggers(words)
        self.outliers = {
            name: Outlier(QUANTITIES[name], factor)
            for name, factor in self.factors.items()
            if name in QUANTITIES
        }

    def observe(self, step: int, loss: float, gradient_norm: float) -> list[Fired]:
        """Append a step. Returns the triggers that it fires."""
        values = {"spike": ("loss", loss), "grad_norm": ("gradient norm", gradient_norm)}
        bad = [f"{name} {value}" for name, value in values.values() if not math.isfinite(value)]
        found = [Fired("nan", step, bad[0])] if bad and "nan" in self.factors else []
        for trigger, outlier in self.outliers.items():
            name, value = values[trigger]
            if math.isfinite(value) and (value > 0 or not outlier.quantity.log):
                bound = outlier.observe(value)
                if bound is not None:
                    found.append(Fired(trigger, step, f"{name} {value:.4g}, above {bound:.4g}"))
        return found


def read_triggers(folder: Path) -> list[dict[str, Any]]:
    """Return the triggers in the folder of a monitor. Torn lines are left out."""
    try:
        lines = (folder / TRIGGERED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for text in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(text)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int) and "trigger" in entry:
                found.append(entry)
    return found

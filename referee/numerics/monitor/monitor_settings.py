"""The settings of a monitor, and the config.json of msProbe's TrainerMon, which has them in its own words."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LOSS, NORM, Outlier
from referee.numerics.monitor.monitor_tables import GRADIENTS, KINDS, MOMENTS, STATISTICS, STEPS_PER_FILE
from referee.numerics.text_files import read_dump_json, write_json, writing

# What a monitor watches: targets such as "grad:blocks.3" or "actv:blocks.*.mlp", names of a model, the control file.
#
# The file changes the targets of a monitor while it runs, <run>/monitor/control.json:
#
# {"targets": ["grad:blocks.3", "actv"]}
#
# The monitor reads it when it changes, and watches these targets in every step, besides those of its configuration.


GROUPS: dict[str, tuple[str, ...]] = {
    # with what a step is checked by (referee.numerics.monitor.invariants)
    "grad": ("grad_before", "data", *GRADIENTS[:2], "learning_rate"),
    "adam": MOMENTS,
    "update": ("update_ratio",),
    "all": tuple(KINDS),
}
# trigger (referee.numerics.monitor.monitor_settings) -> its limit by default
TRIGGERS: Mapping[str, float] = {"nan": 0.0, "spike": 8.0, "grad_norm": 8.0}
CONTROL = "control.json"  # of <run>/monitor
# parts of a tensor's name after its module
SIDES = {"actv": ("input", "output"), "actv_grad": ("input_grad", "output_grad"), "attention": ("sdpa",)}
MOST_NAMES = 3  # in a message
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")  # of DistributedDataParallel, torch.compile, FSDP


@dataclass(frozen=True)
class MonitorTarget:
    """A kind or group, and a path: its module or parameter, everything within it, or a pattern with * and ?."""

    group: str
    path: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return GROUPS.get(self.group, (self.group,))

    def wants(self, kind: str, name: str) -> bool:
        """Whether the target includes a row of the tables."""
        if kind not in self.kinds:
            return False
        path = self.path
        if not path or name == path or name.startswith(f"{path}."):
            return True
        return any(sign in path for sign in "*?[") and (
            fnmatch.fnmatchcase(name, path) or fnmatch.fnmatchcase(name, f"{path}.*")
        )

    def __str__(self) -> str:
        return f"{self.group}:{self.path}" if self.path else self.group


def parse_targets(words: Iterable[str]) -> tuple[MonitorTarget, ...]:
    """Parse KIND or KIND:PATH. NumericsError names an unknown kind."""
    found = []
    for word in words:
        group, _, path = word.partition(":")
        if group not in GROUPS and group not in KINDS:
            known = ", ".join([*GROUPS, *KINDS])
            raise NumericsError(
                f"{word!r} has the unknown kind {group!r}; fix: use KIND or KIND:PATH, KIND one of {known}"
            )
        found.append(MonitorTarget(group, path))
    return tuple(found)


def plain_name(name: str, most: int | None = None) -> str:
    """Return the name of a module or parameter without the wrappers around the model, of "module" at most as many."""
    parts = [part for part in name.split(".") if part not in WRAPPERS[1:]]
    while parts and parts[0] == WRAPPERS[0] and most != 0:
        parts, most = parts[1:], None if most is None else most - 1
    return ".".join(parts)


def model_names(model: Any) -> Callable[[str], str]:
    """Return the function from the name of a module or parameter to its plain one, for a torch module.

    A module named "module" is in a wrapper where it is the only one, and the module around it has no parameters.
    """
    count = 0
    while model is not None:
        children = dict(model.named_children())
        name = next(iter(children), "")
        if len(children) != 1 or name not in WRAPPERS or (name == WRAPPERS[0] and model._parameters):
            break
        count += name == WRAPPERS[0]
        model = children[name]
    return functools.partial(plain_name, most=count)


def parse_triggers(words: Sequence[str]) -> dict[str, float]:
    """Parse NAME or NAME:K. NumericsError names one that cannot be used."""
    found = {}
    for word in words:
        name, colon, factor = word.partition(":")
        if name not in TRIGGERS:
            raise NumericsError(f"{word!r} is not a trigger; fix: use {', '.join(TRIGGERS)}, or NAME:K")
        try:
            found[name] = float(factor) if colon else TRIGGERS[name]
        except ValueError:
            found[name] = math.nan
        if not (found[name] > 0 or name == "nan") or math.isinf(found[name]):
            raise NumericsError(f"{word!r} has no number above 0 after the colon; fix: such as {name}:8")
    return found


@dataclass(frozen=True)
class ModelNames:
    """Paths without the wrappers around the model. parameters: those that are trained. modules: without the root."""

    parameters: tuple[str, ...]
    modules: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> ModelNames:
        """Return the names of a torch module."""
        plain = model_names(model)
        parameters = (plain(name) for name, one in model.named_parameters() if one.requires_grad)
        modules = (plain(name) for name, _ in model.named_modules())
        return cls(tuple(parameters), tuple(dict.fromkeys(filter(None, modules))))

    def matches(self, target: MonitorTarget) -> bool:
        """Whether the model has a tensor that the target can name."""
        ending = re.search(r"\.?([0-9]+)$", target.path)
        number = ending[1] if ending else "0"  # of a tensor among a module's inputs or outputs
        for kind in target.kinds:
            names = list(self.parameters)
            if kind in SIDES:
                paths = ["", *(f"{path}." for path in self.modules)]
                names = [f"{path}{side}.{number}" for path in paths for side in SIDES[kind]]
            if any(target.wants(kind, name) for name in names):
                return True
        return False

    def problem(self, target: MonitorTarget) -> str:
        """Return the line on a target without a match, with near names; "" where it matches."""
        if self.matches(target):
            return ""
        kinds = sorted({"module" if kind in SIDES else "trained parameter" for kind in target.kinds})
        known = sorted({*self.modules, *self.parameters} - {target.path})
        near = difflib.get_close_matches(target.path, known, n=MOST_NAMES, cutoff=0.5)
        fix = (
            f"did you mean {', '.join(near)}" if near else f"use a path such as {known[0] if known else '*'}"
        )
        return f"{target} matches no {' and no '.join(kinds)} of the model; fix: {fix}"


def read_control(folder: Path) -> tuple[MonitorTarget, ...]:
    """Return the targets in the file of a folder; none without a file. NumericsError where it cannot be used."""
    path = folder / CONTROL
    if not path.exists():
        return ()
    content = read_dump_json(path, "make monitor RUN= OFF=all")
    words = content.get("targets") if isinstance(content, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise NumericsError(f'{path} has no list "targets"; fix: make monitor RUN= OFF=all')
    return parse_targets(words)


def change_control(folder: Path, on: Sequence[str] = (), off: Sequence[str] = ()) -> None:
    """Switch targets on and off. off: as they were switched on, or "all"."""
    adding, removing = parse_targets(on), parse_targets(off)
    everything = MonitorTarget("all") in removing
    before = () if everything else read_control(folder)
    missing = [f"{target}" for target in removing if target not in before and target != MonitorTarget("all")]
    if missing:
        known = ", ".join(map(str, before)) or "nothing"
        raise NumericsError(f"{', '.join(missing)} is not switched on; fix: switch off {known}, or all")
    kept = [target for target in before if target not in removing]
    path = folder / CONTROL
    with writing(path, "check the permissions of the run's folder"):
        write_json(path, {"targets": list(dict.fromkeys(map(str, [*kept, *adding])))})


class ControlFile:
    """Reads the file of a folder when it has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: tuple[int, int] | None = None

    def changed(self) -> tuple[MonitorTarget, ...] | None:
        """Return the targets of a changed file; None of an unchanged one. NumericsError where it cannot be used."""
        try:
            found = (self.folder / CONTROL).stat()
            now: tuple[int, int] | None = (found.st_mtime_ns, found.st_ino)
        except OSError:
            now = None
        if now == self._seen:
            return None
        self._seen = now
        return read_control(self.folder)


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

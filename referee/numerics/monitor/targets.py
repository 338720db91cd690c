"""What a monitor watches: targets such as "grad:blocks.3" or "actv:blocks.*.mlp", names of a model, the control file.

The file changes the targets of a monitor while it runs, <run>/monitor/control.json:

    {"targets": ["grad:blocks.3", "actv"]}

The monitor reads it when it changes, and watches these targets in every step, besides those of its configuration.
"""

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
from typing import Any

from referee.errors import NumericsError
from referee.numerics.text_files import read_dump_json, write_json, writing

# The tables of a monitor: the contract between the monitor and everything that reads its files.
#
# <run>/monitor/rank<r>/<kind>_<first>-<last>.csv      rows of the steps first .. last, both included
#
# Kinds and columns are msProbe's, as far as it has them (MindStudio-Probe, monitor: CSV_HEADER and the prefixes of
# its writer). Every file begins with a header. One row is one tensor in one step:
#
# vpp_stage,name,step,norm,mean,min,max,std,zeros,nan,inf      every kind but those below
# vpp_stage,name,step,ratio                                    update_ratio
# vpp_stage,name,step,entropy,logit_max                        attention
# vpp_stage,name,step,rate,scheduled                           learning_rate
#
# kind            name                                         content
# grad_before     <parameter>                                  gradients that are there when backward begins
# data            input.<i>                                    inputs of the model, over all micro-batches
# actv            <module>.input.<i>, <module>.output.<i>      values of forward, over all micro-batches of the step
# actv_grad       <module>.input_grad.<i>, .output_grad.<i>    gradients of these
# grad_unreduced  <parameter>                                  this rank's sum over its micro-batches
# grad_reduced    <parameter>                                  the sum over all ranks, before clipping
# grad_clipped    <parameter>                                  what the optimizer receives
# learning_rate   group<i>                                     rate; steps of the scheduler
# param           <parameter>                                  weights after the update
# exp_avg, exp_avg_sq   <parameter>                            Adam's moments after the update
# update_ratio    <parameter>                                  norm of the update / norm of the weights before
# attention       <module>.sdpa.<i>                            call i of scaled_dot_product_attention in the module
#
# vpp_stage is 0. step counts from 1 in this trainer, as `iteration` in metrics.jsonl does. norm is the Euclidean
# norm, std is of the population, zeros is the fraction of elements that equal 0, nan and inf are counts; the others
# are nan where an element is. The update ratio of weights that are zero, as of new biases, is inf. entropy is the
# mean over heads and queries, in nats; logit_max is the largest scaled score that the mask admits. A run of one rank
# has no reduction, and so no grad_unreduced.
#
# A step is absent where its kind was not monitored in it, so rows are not evenly spaced. The last line of a killed
# run may be torn; `read_series` leaves it out. Rows are in the order of the steps, and a step has a name at most once.


KEYS = ("vpp_stage", "name", "step")
STATISTICS = ("norm", "mean", "min", "max", "std", "zeros", "nan", "inf")
GRADIENTS = ("grad_unreduced", "grad_reduced", "grad_clipped")
MOMENTS = ("exp_avg", "exp_avg_sq")
# in the order in which a step computes them
KINDS: Mapping[str, tuple[str, ...]] = {
    "grad_before": STATISTICS,
    "data": STATISTICS,
    "actv": STATISTICS,
    "attention": ("entropy", "logit_max"),
    "actv_grad": STATISTICS,
    **dict.fromkeys(GRADIENTS, STATISTICS),
    "learning_rate": ("rate", "scheduled"),
    "update_ratio": ("ratio",),
    **dict.fromkeys(MOMENTS, STATISTICS),
    "param": STATISTICS,
}

GROUPS: dict[str, tuple[str, ...]] = {
    # with what a step is checked by (referee.numerics.monitor.invariants)
    "grad": ("grad_before", "data", *GRADIENTS[:2], "learning_rate"),
    "adam": MOMENTS,
    "update": ("update_ratio",),
    "all": tuple(KINDS),
}


# trigger (gpt2.watch) -> its limit by default
TRIGGERS: Mapping[str, float] = {"nan": 0.0, "spike": 8.0, "grad_norm": 8.0}


STEPS_PER_FILE = 1000


CONTROL = "control.json"  # of <run>/monitor
TRIGGERED = "triggers.jsonl"  # of <run>/monitor: {"step", "trigger", "reason", "checkpoint"}


# parts of a tensor's name after its module
SIDES = {"actv": ("input", "output"), "actv_grad": ("input_grad", "output_grad"), "attention": ("sdpa",)}


MOST_NAMES = 3  # in a message


# of DistributedDataParallel, torch.compile, DeepSpeed, activation checkpointing, FSDP
WRAPPERS = ("module", "_orig_mod", "_forward_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


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


@dataclass(frozen=True)
class MonitorConfig:
    """Which rows a monitor writes, and how."""

    targets: tuple[str, ...] = ("grad", "param")  # words KIND or KIND:PATH
    interval: int = 10  # steps from one monitored step to the next
    start: int = 0  # the first monitored step
    times: int = 10**8  # monitored steps in all
    statistics: tuple[str, ...] = STATISTICS  # columns, some of STATISTICS
    steps_per_file: int = STEPS_PER_FILE

    def __post_init__(self) -> None:
        parse_targets(self.targets)
        lowest = {"interval": 1, "start": 0, "times": 0, "steps_per_file": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise NumericsError(f"{name} is {value!r}; fix: a whole number from {least}")
        if not self.statistics or not {*self.statistics} <= {*STATISTICS}:
            raise NumericsError(
                f"statistics are {list(self.statistics)}; fix: use some of {', '.join(STATISTICS)}"
            )


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


class ChangedFile:
    """Says whether a file has changed since it was asked last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None

    def changed(self) -> bool:
        before, self._seen = self._seen, None
        with contextlib.suppress(OSError):
            found = self.path.stat()
            self._seen = found.st_mtime_ns, found.st_ino
        return self._seen != before


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

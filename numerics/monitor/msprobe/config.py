"""Read config.json of msProbe's TrainerMon: its keys, their defaults, and the monitor's configuration of them."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from numerics.dump_files import this_rank
from numerics.errors import NumericsError
from numerics.monitor.monitor import MonitorConfig
from numerics.monitor.names import ModelNames
from numerics.monitor.tables import STATISTICS
from numerics.monitor.targets import MonitorTarget, plain_name

GROUPS = {  # switch of config.json -> groups of targets
    "wg_distribution": ("grad",),
    "param_distribution": ("param",),
    "mv_distribution": ("adam",),
    "ur_distribution": ("update",),
    "mg_direction": ("mg_direction",),
    "attention_distribution": ("attention",),  # not msProbe's
}
REFUSED = {
    "cc_distribution": "calls of torch.distributed are not observed; grad_unreduced and grad_reduced are the two sides",
    "alert": "config.json has no rules here; numerics.monitor.triggers has them",
    "append_output": "start_iteration of set_monitor continues the tables of a resumed run",
    "stack_info": "call stacks are not recorded",
    "monitor_mbs_grad": "gradients of single micro-batches are not recorded",
    "recording_l2_features": "attention_distribution has entropy and largest logit",
}
IGNORED = ("eps", "squash_name", "sa_order")  # of msProbe; nothing here depends on them
OPS = {"nans": "nan"}  # msProbe's name -> ours
SIDES = ("input", "output", "input_grad", "output_grad")
DEFAULT_OPS = ("norm", "mean", "max", "min")


def check_settings(content: Any) -> dict[str, Any]:
    """Return msProbe's config.json with defaults. NumericsError names an entry that cannot be used."""
    if not isinstance(content, dict):
        raise NumericsError("the configuration is not a JSON object; fix: see docs/monitor.md")
    defaults: dict[str, Any] = {
        "targets": {}, "xy_distribution": False, "all_xy": False, "forward_only": False, "backward_only": False,
        **dict.fromkeys(GROUPS, False), "ops": list(DEFAULT_OPS), "ndigits": 6, "start_step": 0,
        "collect_times": 10**8, "step_interval": 1, "step_count_per_record": 1, "print_struct": False,
        "format": "csv", "dynamic_on": False, "module_ranks": [],
    }  # fmt: skip
    for name, reason in REFUSED.items():
        value = content.get(name)
        if value.get("enable", value.get("rules")) if isinstance(value, dict) else value:
            raise NumericsError(f"{name} is not supported: {reason}; fix: remove it")
    for name in content.keys() - {*defaults, *REFUSED, *IGNORED}:
        near = difflib.get_close_matches(name, [*defaults, *REFUSED], n=1, cutoff=0.5)
        raise NumericsError(
            f"{name} is not a key; fix: "
            f"{f'did you mean {near[0]}' if near else 'remove it; docs/monitor.md has the keys'}"
        )
    settings = {}
    for name, default in defaults.items():
        value = content.get(name, default)
        if type(value) is not type(default):
            raise NumericsError(f"{name} is {value!r}; fix: write a value such as {json.dumps(default)}")
        settings[name] = value
    if settings["format"] != "csv":
        raise NumericsError(f'format is "{settings["format"]}"; fix: use csv')
    monitor_config(settings)
    return settings


def monitor_config(settings: dict[str, Any], names: ModelNames | None = None) -> MonitorConfig:
    """Return the monitor's configuration of checked settings. names: of the model."""
    groups = [group for switch, names in GROUPS.items() if settings[switch] for group in names]
    if settings["xy_distribution"]:
        groups += ["actv"] * (not settings["backward_only"]) + ["actv_grad"] * (not settings["forward_only"])
    ops = tuple(OPS.get(str(name), str(name)) for name in settings["ops"])
    return MonitorConfig(
        targets=tuple(f"{target}" for group in groups for target in _paths(group, settings, names)),
        interval=settings["step_interval"],
        start=settings["start_step"],
        times=settings["collect_times"],
        statistics=tuple(name for name in STATISTICS if name in ops) if set(ops) <= set(STATISTICS) else ops,
        digits=max(1, settings["ndigits"]),
        steps_per_file=settings["step_count_per_record"],
    )


def check_targets(path: Path, settings: dict[str, Any], names: ModelNames) -> None:
    """NumericsError for an entry of `targets` that names no module and no parameter of the model."""
    for target in _paths("all", settings, names):
        problem = names.problem(target)
        if problem:
            raise NumericsError(f"{path}: targets: {problem.removeprefix('all:')}")


def _paths(group: str, settings: dict[str, Any], names: ModelNames | None = None) -> list[MonitorTarget]:
    """Return the targets of a group: all modules, or those that `targets` lists with their sides."""
    listed = settings["targets"]
    if not listed or (group in ("actv", "actv_grad") and settings["all_xy"]):
        return [MonitorTarget(group)]
    found = []
    known = (*names.modules, *names.parameters) if names else ()
    for path, sides in listed.items():
        path = re.sub(r"^[0-9]+:", "", path)
        path = path if path in known else plain_name(path)
        sides = sides if isinstance(sides, dict) else {}
        unknown = [side for side in sides if side not in SIDES]
        if unknown:
            raise NumericsError(f"targets has {unknown[0]!r} for {path}; fix: use {', '.join(SIDES)}")
        mine = [side for side in sides if side.endswith("_grad") == (group == "actv_grad")]
        if group in ("actv", "actv_grad") and mine:
            for side in mine:
                index = str(sides[side]).partition(":")[2] or "0"
                found.append(MonitorTarget(group, f"{path}.{side}.{index}" if path else f"{side}.{index}"))
        elif group not in ("actv", "actv_grad") or not sides:
            found.append(MonitorTarget(group, path))
    return found


def ranks_wanted(settings: dict[str, Any]) -> bool:
    """Whether this rank is monitored."""
    return not settings["module_ranks"] or this_rank() in settings["module_ranks"]

"""The monitor with the interface and the config.json of msProbe's TrainerMon, section 4.6.

    monitor = TrainerMon("config.json", params_have_main_grad=False)
    monitor.set_monitor(model, optimizer, grad_acc_steps=4)

It observes forward, backward and optimizer.step() by hooks, so nothing else of the script changes. A step ends with
optimizer.step(). grad_unreduced is read when backward of the last micro-batch has summed a gradient, and grad_reduced
when optimizer.step() is called: after the reduction, and after clipping where the script clips.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numerics.describe import tensors_in
from numerics.dump_files import read_json, this_rank
from numerics.errors import NumericsError
from numerics.monitor.export import TensorBoard
from numerics.monitor.monitor import Monitor, MonitorConfig, local
from numerics.monitor.names import ModelNames
from numerics.monitor.tables import MOMENTS, STATISTICS
from numerics.monitor.targets import Target, plain_name

OUTPUT, DYNAMIC = "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR"  # environment variables of msProbe
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


class TrainerMon:
    """Monitor a script as config.json says. process_group: accepted; every rank of torch.distributed writes its folder.

    params_have_main_grad: gradients are in parameter.main_grad, as in Megatron. NumericsError where config.json cannot
    be read or used.
    """

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        process_group: Any = None,
        params_have_main_grad: bool = False,
        opt_ty: str | None = None,
    ) -> None:
        self.path = Path(config_file_path)
        self.main_grad = params_have_main_grad
        self.dynamic = os.environ.get(DYNAMIC, "").lower() == "true"
        self.settings = self._read()
        self.monitor: Monitor | None = None
        self._handles: list[Any] = []
        self._open = contextlib.ExitStack()
        self._running = False
        self._board: TensorBoard | None = None
        self._shapes: dict[str, dict[str, Any]] = {}
        self._compared = False  # whether the rows of a step were compared with the switches

    def _read(self) -> dict[str, Any]:
        content = read_json(self.path, "correct it")
        try:
            return check_settings(content)
        except NumericsError as error:
            raise NumericsError(f"{self.path}: {error}") from error

    def set_monitor(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int = 1,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Install the hooks. grad_acc_steps: micro-batches of a step. start_iteration: steps before this process."""
        if isinstance(model, list | tuple):
            model = nn.ModuleList(model) if len(model) > 1 else model[0]
        assert isinstance(model, nn.Module)
        if grad_acc_steps < 1:
            raise NumericsError(f"grad_acc_steps is {grad_acc_steps}; fix: a number from 1")
        self.iteration, self.grad_acc_steps = start_iteration, grad_acc_steps
        self.micro_batch = 0
        folder = Path(os.environ.get(OUTPUT) or "monitor_output")
        config = monitor_config(self.settings)
        self._names = ModelNames.of(model)
        check_targets(self.path, self.settings, self._names)
        if not (config.targets or self.dynamic or self.settings["print_struct"]):
            print(
                f'monitor: {self.path} switches no kind on, so nothing is written; fix: "wg_distribution": true',
                flush=True,
            )
        self.monitor = Monitor(model, optimizer, config, folder, this_rank())
        if start_iteration == 0 and any(self.monitor.folder.glob("*.csv")):
            raise NumericsError(
                f"{self.monitor.folder} has the tables of another run; fix: set {OUTPUT} to another folder, or pass "
                "start_iteration of a resumed run"
            )
        self.monitor.writer.truncate(start_iteration - 1)
        if self.settings["format"] == "tensorboard":
            self._board = TensorBoard(self.monitor.folder / "tensorboard")
        self.monitor.gradient = self._gradient
        self._active = not self.dynamic or self.settings["dynamic_on"]
        self._install(model, optimizer)

    def _install(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        monitor = self._monitor
        self._handles.append(model.register_forward_pre_hook(self._before_forward, prepend=True))
        if self.settings["print_struct"]:
            for path, module in model.named_modules():
                self._handles.append(module.register_forward_hook(self._note_shapes(plain_name(path))))
        for name, parameter in monitor.parameters:
            hook = self._after_gradient(name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._handles.append(optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def close(self) -> None:
        """Remove every hook."""
        self._open.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._board:
            self._board.close()

    @property
    def _monitor(self) -> Monitor:
        assert self.monitor is not None
        return self.monitor

    # -- hooks

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if not self._running:
            self._begin()
        self.micro_batch += 1

    def _begin(self) -> None:
        monitor = self._monitor
        if self.dynamic:
            self._reload()
        self._running, self.micro_batch = True, 0
        monitor.begin(self.iteration)
        if not self._active or not ranks_wanted(self.settings):
            monitor.now = ()
        self._open.enter_context(monitor.forward())

    def _reload(self) -> None:
        """Read a changed config.json, as DYNAMIC_MONITOR=True asks for. A file that cannot be used is reported."""
        try:
            changed = self.path.stat().st_mtime_ns
            if changed == getattr(self, "_changed", None):
                return
            self._changed = changed
            settings = self._read()
            check_targets(self.path, settings, self._names)
            self.settings, self._compared = settings, False
            monitor = self._monitor
            monitor.configure(monitor_config(self.settings))
            self._active = self.settings["dynamic_on"]
        except (OSError, NumericsError) as error:
            print(f"monitor: {' '.join(str(error).split())}; the former configuration stays", flush=True)

    def _after_gradient(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            last = self.micro_batch % self.grad_acc_steps == 0
            if self._running and last and self._monitor.wants("grad_unreduced", name):
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._monitor.pending.replace(("grad_unreduced", name), local(gradient))

        return hook

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        found: Tensor | None = getattr(parameter, "main_grad", None) if self.main_grad else parameter.grad
        return found

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._running:  # a step without forward of the model
            return
        monitor = self._monitor
        named = [(name, self._gradient(parameter)) for name, parameter in monitor.parameters]
        monitor.read("grad_reduced", named)
        self._open.enter_context(monitor.update())

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._running:
            return
        self._open.close()
        wanted = [kind for target in self._monitor.now for kind in target.kinds]
        rows = self._monitor.finish(write=self._board is None)
        if wanted and not self._compared:
            self._compared = True
            self._report_missing([kind for kind in dict.fromkeys(wanted) if kind not in rows], optimizer)
        if self._board:
            self._board.write(rows, self.iteration, self._monitor.writer.columns)
        self._running = False
        self.iteration += 1
        if self.settings["print_struct"]:
            print(json.dumps(self._shapes, indent=4), flush=True)
            raise SystemExit(0)

    def _report_missing(self, kinds: Sequence[str], optimizer: Any) -> None:
        """Print one line on each kind without a tensor in the first monitored step."""
        for kind in kinds:
            if kind == "mg_direction" and self.iteration == 0:
                continue  # the first step has no moment before it
            reason = "no tensor of the targets has it"
            if kind in (*MOMENTS, "mg_direction"):
                reason = f"{type(optimizer).__name__} keeps no such state"
            elif kind == "attention":
                reason = "no module of the targets called scaled_dot_product_attention"
            print(f"monitor: step {self.iteration} has no {kind}: {reason}; no table is written", flush=True)

    def _note_shapes(self, path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            entry = self._shapes.setdefault(f"0:{path}", {})
            for side, value in (("input", inputs), ("output", output)):
                tensors = tensors_in(value)
                config = f"tuple[{len(tensors)}]" if isinstance(value, tuple | list) else "tensor"
                entry[side] = {"config": config} | {
                    str(number): f"size={tuple(tensor.shape)}, dtype={tensor.dtype}"
                    for number, tensor in enumerate(tensors)
                }

        return hook


def check_settings(content: Any) -> dict[str, Any]:
    """Return msProbe's config.json with defaults. NumericsError names an entry that cannot be used."""
    if not isinstance(content, dict):
        raise NumericsError("the configuration is no JSON object; fix: see docs/monitor.md")
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
            f"{name} is no key; fix: {f'did you mean {near[0]}' if near else 'remove it; docs/monitor.md has the keys'}"
        )
    settings = {}
    for name, default in defaults.items():
        value = content.get(name, default)
        if type(value) is not type(default):
            raise NumericsError(f"{name} is {value!r}; fix: write a value such as {json.dumps(default)}")
        settings[name] = value
    if settings["format"] not in ("csv", "tensorboard"):
        raise NumericsError(f'format is "{settings["format"]}"; fix: use csv or tensorboard')
    monitor_config(settings)
    return settings


def monitor_config(settings: dict[str, Any]) -> MonitorConfig:
    """Return the monitor's configuration of checked settings."""
    groups = [group for switch, names in GROUPS.items() if settings[switch] for group in names]
    if settings["xy_distribution"]:
        groups += ["actv"] * (not settings["backward_only"]) + ["actv_grad"] * (not settings["forward_only"])
    ops = tuple(OPS.get(str(name), str(name)) for name in settings["ops"])
    return MonitorConfig(
        targets=tuple(f"{target}" for group in groups for target in _paths(group, settings)),
        interval=settings["step_interval"],
        start=settings["start_step"],
        times=settings["collect_times"],
        statistics=tuple(name for name in STATISTICS if name in ops) if set(ops) <= set(STATISTICS) else ops,
        digits=max(1, settings["ndigits"]),
        steps_per_file=settings["step_count_per_record"],
    )


def check_targets(path: Path, settings: dict[str, Any], names: ModelNames) -> None:
    """NumericsError for an entry of `targets` that names no module and no parameter of the model."""
    for target in _paths("all", settings):
        problem = names.problem(target)
        if problem:
            raise NumericsError(f"{path}: targets: {problem.removeprefix('all:')}")


def _paths(group: str, settings: dict[str, Any]) -> list[Target]:
    """Return the targets of a group: all modules, or those that `targets` lists with their sides."""
    listed = settings["targets"]
    if not listed or (group in ("actv", "actv_grad") and settings["all_xy"]):
        return [Target(group)]
    found = []
    for path, sides in listed.items():
        path = plain_name(re.sub(r"^[0-9]+:", "", path))
        sides = sides if isinstance(sides, dict) else {}
        unknown = [side for side in sides if side not in SIDES]
        if unknown:
            raise NumericsError(f"targets has {unknown[0]!r} for {path}; fix: use {', '.join(SIDES)}")
        mine = [side for side in sides if side.endswith("_grad") == (group == "actv_grad")]
        if group in ("actv", "actv_grad") and mine:
            for side in mine:
                index = str(sides[side]).partition(":")[2] or "0"
                found.append(Target(group, f"{path}.{side}.{index}" if path else f"{side}.{index}"))
        elif group not in ("actv", "actv_grad") or not sides:
            found.append(Target(group, path))
    return found


def ranks_wanted(settings: dict[str, Any]) -> bool:
    """Whether this rank is monitored."""
    return not settings["module_ranks"] or this_rank() in settings["module_ranks"]

"""A monitor of any training script: hooks observe forward, backward and optimizer.step(), and nothing else changes.

A step ends with optimizer.step(). grad_unreduced is read when backward of the last micro-batch has summed a gradient,
and grad_reduced when optimizer.step() is called: after the reduction, and after clipping where the script clips.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from referee.errors import NumericsError
from referee.numerics.describe import tensors_in
from referee.numerics.dump_files import this_rank
from referee.numerics.monitor.monitor_settings import check_targets, monitor_config, read_settings
from referee.numerics.monitor.statistics import reason
from referee.numerics.monitor.step_monitor import StepMonitor, local
from referee.numerics.monitor.targets import ModelNames, model_names

OUTPUT, DYNAMIC = "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR"  # environment variables of msProbe


def harmless(hook: Callable[..., Any]) -> Any:
    """Print an error of a hook as one line, so that the script goes on."""

    @functools.wraps(hook)
    def guarded(self: Monitor, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self.say_once(f"{reason(error)}; rows are missing")
            return None

    return guarded


class Monitor(StepMonitor):
    """A monitor that `attach` gives its hooks. Without them a loop calls it at its own points, as StepMonitor says.

    Gradients are in parameter.main_grad where a parameter has it, as in Megatron.
    """

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config_path: str | os.PathLike[str],
        *,
        micro_batches: int = 1,
        start: int = 0,
        scheduler: Any = None,
        replicas: Sequence[int] = (),
    ) -> Monitor:
        """Monitor a script by hooks as config_path says, the config.json of msProbe (docs/monitor.md).

        micro_batches: of a step. start: steps before this process. scheduler, replicas: see StepMonitor. NumericsError
        where the configuration cannot be used, or the folder has the tables of another run.
        """
        if micro_batches < 1:
            raise NumericsError(f"grad_acc_steps is {micro_batches}; fix: a number from 1")
        path, names = Path(config_path), ModelNames.of(model)
        settings = read_settings(path)
        check_targets(path, settings, names)
        folder = Path(os.environ.get(OUTPUT) or "monitor_output")
        monitor = cls(model, optimizer, monitor_config(settings, names), folder, this_rank())
        if start == 0 and any(monitor.folder.glob("*.csv")):
            raise NumericsError(
                f"{monitor.folder} has the tables of another run; fix: set {OUTPUT} to another folder, or pass "
                "start_iteration of a resumed run"
            )
        monitor.writer.truncate(start - 1)
        monitor.scheduler, monitor.replicas = scheduler, tuple(replicas)
        monitor._attach(path, settings, names, micro_batches, start)
        monitor._install(model, optimizer)
        return monitor

    def _attach(
        self, path: Path, settings: dict[str, Any], names: ModelNames, micro_batches: int, start: int
    ) -> None:
        """Set the state of the hooks."""
        self.path, self.settings, self.names = path, settings, names
        self.gradient = lambda parameter: getattr(parameter, "main_grad", parameter.grad)
        self.iteration, self.micro_batches, self.micro_batch = start, micro_batches, 0
        self.dynamic = os.environ.get(DYNAMIC, "").lower() == "true"
        self.active = not self.dynamic or settings["dynamic_on"]
        self.running = False  # from the first forward of a step to the end of its update
        self.updating = False  # between the gradients of a step and its end
        self.observed = False  # whether a forward was
        self.compared = False  # whether the rows of a step were compared with the switches
        self.backward: tuple[nn.Parameter, Any] | None = (
            None  # a parameter, and its gradient's state after backward
        )
        self.changed: int | None = None  # when the configuration was
        self.shapes: dict[str, dict[str, Any]] = {}
        self._handles: list[Any] = []
        self._open = contextlib.ExitStack()
        self._lines: set[str] = set()
        if not (self.targets or self.dynamic or settings["print_struct"]):
            self.say_once(f'{path} switches no kind on, so nothing is written; fix: "wg_distribution": true')

    def _install(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        untraced = torch.compiler.disable  # compiled code would trace a hook
        before = untraced(self._before_forward)
        self._handles.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        if self.settings["print_struct"]:
            names = model_names(model)
            for path, module in model.named_modules():
                self._handles.append(module.register_forward_hook(self._note_shapes(names(path))))
        for name, parameter in self.parameters:
            hook = untraced(functools.partial(self._after_gradient, name))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        # a model that is compiled from within its forward calls hooks that are installed after its first call
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        self._handles.append(optimizer.register_step_pre_hook(untraced(self._before_update)))
        self._handles.append(optimizer.register_step_post_hook(untraced(self._after_update)))

    def close(self) -> None:
        """Remove every hook. The rows of a step that the optimizer skipped are written."""
        if self.running and self.backward and self.micro_batch >= self.micro_batches:
            self._end_skipped()
        self._open.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def say_once(self, line: str) -> None:
        """Print a line the first time."""
        if line not in self._lines:
            self._lines.add(line)
            self.say(f"monitor: {line}")

    # -- hooks

    @harmless
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.updating or not module.training or not torch.is_grad_enabled():
            return
        if self._skipped():
            self._end_skipped()
        if not self.running:
            self._begin_step(args, kwargs)
        self.micro_batch += 1
        if self.wants("data"):
            inputs = [one.detach() for one in tensors_in([list(args), kwargs]) if not one.is_meta]
            numbers = [one if one.is_floating_point() or one.is_complex() else one.double() for one in inputs]
            self.read("data", [(f"input.{place}", one) for place, one in enumerate(numbers)])

    def _begin_step(self, args: Any, kwargs: Any) -> None:
        if self.dynamic:
            self._reload()
        self.running = self.observed = True
        self.micro_batch, self.backward = 0, None
        self.begin(self.iteration)
        if not self.active:
            self.now = ()
        watch = self._open.enter_context(self.forward())
        if watch:
            watch.root_runs(args, kwargs)

    def _reload(self) -> None:
        """Read a changed config.json, as DYNAMIC_MONITOR=True asks for. A file that cannot be used is reported."""
        try:
            changed = self.path.stat().st_mtime_ns
            if changed == self.changed:
                return
            self.changed = changed
            settings = read_settings(self.path)
            check_targets(self.path, settings, self.names)
            self.configure(monitor_config(settings, self.names))
            self.settings, self.active, self.compared = settings, settings["dynamic_on"], False
        except (OSError, NumericsError) as error:
            self.say(f"monitor: {' '.join(str(error).split())}; the former configuration stays")

    @harmless
    def _after_gradient(self, name: str, parameter: nn.Parameter) -> None:
        if self.updating or not self.running:
            return
        self.backward = (parameter, self._state(parameter))
        gradient = self.gradient(parameter)
        last = self.micro_batch % self.micro_batches == 0
        if last and gradient is not None and self.wants("grad_unreduced", name):
            self.pending.replace(("grad_unreduced", name), local(gradient))

    def _state(self, parameter: nn.Parameter) -> Any:
        """Return the identity and version of a gradient, which any change of it changes."""
        gradient = self.gradient(parameter)
        return None if gradient is None else (id(gradient), gradient._version)

    def _skipped(self) -> bool:
        """Whether backward of every micro-batch ran, and its gradients were changed since or are gone."""
        if not self.running or self.updating or self.backward is None:
            return False
        parameter, after = self.backward
        return self.micro_batch >= self.micro_batches and self._state(parameter) != after

    def _end_skipped(self) -> None:
        self._open.close()
        self._end_step()
        self.say(
            f"monitor: step {self.current}: the optimizer made no step after backward, as with GradScaler at Inf or "
            "NaN; the step has rows of activations and grad_unreduced alone"
        )

    @harmless
    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.updating = True  # what a closure computes is no step
        if not self.running:
            if not self.observed:
                self.say_once(
                    "the optimizer made a step and no forward in training mode was observed; fix: pass the module that "
                    "the script calls, call model.train(), and no closure to optimizer.step()"
                )
            return
        self._open.close()
        self.gradients("grad_reduced")
        self._open.enter_context(self.update())

    @harmless
    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.updating = False
        if not self.running:
            return
        self._open.close()
        wanted = dict.fromkeys(kind for target in self.now for kind in target.kinds)
        rows = self._end_step()
        if wanted and not self.compared:
            self.compared = True
            self._report_missing([kind for kind in wanted if kind not in rows], optimizer)
        if self.settings["print_struct"]:
            print(json.dumps(self.shapes, indent=4), flush=True)
            raise SystemExit(0)

    def _end_step(self) -> dict[str, Any]:
        """Write the rows of the step, and return them."""
        self.running = self.updating = False
        self.backward = None
        self.iteration += 1
        return self.finish()

    def _report_missing(self, kinds: Sequence[str], optimizer: Any) -> None:
        """Print one line on the kinds without a tensor in the first monitored step."""
        missing = [
            kind for kind in kinds if kind not in ("grad_before", "data")
        ]  # none in a sound step, or of inputs
        if missing:
            self.say(
                f"monitor: step {self.current} has no {', '.join(missing)}: no tensor of the targets has it, "
                f"{type(optimizer).__name__} keeps no such state, or no module called scaled_dot_product_attention"
            )

    def _note_shapes(self, path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            entry = self.shapes.setdefault(f"0:{path}", {})
            for side, value in (("input", inputs), ("output", output)):
                tensors = tensors_in(value)
                config = f"tuple[{len(tensors)}]" if isinstance(value, tuple | list) else "tensor"
                entry[side] = {"config": config} | {
                    str(number): f"size={tuple(tensor.shape)}, dtype={tensor.dtype}"
                    for number, tensor in enumerate(tensors)
                }

        return hook


class TrainerMon:
    """A monitor with the names of msProbe, as in section 4.6 of the guide.

    process_group, params_have_main_grad, opt_ty: accepted. Every rank of torch.distributed writes its folder, and a
    gradient is read from main_grad where a parameter has it. NumericsError where config.json cannot be used.
    """

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        process_group: Any = None,
        params_have_main_grad: bool = True,
        opt_ty: str | None = None,
    ) -> None:
        self.path = Path(config_file_path)
        read_settings(self.path)
        self.monitor: Monitor | None = None

    def set_monitor(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int = 1,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Install the hooks. grad_acc_steps: micro-batches of a step. start_iteration: steps before this process.

        dp_group: the ranks that hold the same weights, by default all. tp_group: accepted.
        """
        if not isinstance(model, nn.Module):
            model = nn.ModuleList(model) if len(model) > 1 else model[0]
        replicas = torch.distributed.get_process_group_ranks(dp_group) if dp_group else ()
        self.monitor = Monitor.attach(
            model,
            optimizer,
            self.path,
            micro_batches=grad_acc_steps,
            start=start_iteration,
            replicas=replicas,
        )

    def close(self) -> None:
        """Remove every hook. The rows of a step that the optimizer skipped are written."""
        if self.monitor:
            self.monitor.close()

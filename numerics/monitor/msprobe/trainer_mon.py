"""The monitor with the interface and the config.json of msProbe's TrainerMon, section 4.6.

    monitor = TrainerMon("config.json", params_have_main_grad=False)
    monitor.set_monitor(model, optimizer, grad_acc_steps=4)

It observes forward, backward and optimizer.step() by hooks, so nothing else of the script changes. A step ends with
optimizer.step(). grad_unreduced is read when backward of the last micro-batch has summed a gradient, and grad_reduced
when optimizer.step() is called: after the reduction, and after clipping where the script clips.
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
from torch import Tensor, nn

from numerics.describe import tensors_in
from numerics.dump_files import read_json, this_rank
from numerics.errors import NumericsError
from numerics.monitor.monitor import Monitor, local
from numerics.monitor.msprobe.config import check_settings, check_targets, monitor_config, ranks_wanted
from numerics.monitor.names import ModelNames
from numerics.monitor.statistics import reason
from numerics.monitor.tables import MOMENTS
from numerics.monitor.targets import model_names

OUTPUT, DYNAMIC = "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR"  # environment variables of msProbe


def harmless(hook: Callable[..., Any]) -> Any:
    """Print an error of a hook as one line, so that the script goes on."""

    @functools.wraps(hook)
    def guarded(self: TrainerMon, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self._say(f"{reason(error)}; rows are missing")
            return None

    return guarded


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
        self._shapes: dict[str, dict[str, Any]] = {}
        self._compared = False  # whether the rows of a step were compared with the switches
        self._updating = False  # between the gradients of a step and its end
        self._ignored = ""  # why the last forward was not observed
        self._observed = False  # whether a forward was
        self._backward: tuple[Tensor, Any] | None = (
            None  # a parameter and the state of its gradient after backward
        )
        self._said: set[str] = set()

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
        self._names = ModelNames.of(model)
        config = monitor_config(self.settings, self._names)
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
        self.monitor.gradient = self._gradient
        self._active = not self.dynamic or self.settings["dynamic_on"]
        self._install(model, optimizer)

    def _install(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        monitor, untraced = self._monitor, torch.compiler.disable  # compiled code would trace a hook
        before = model.register_forward_pre_hook(
            untraced(self._before_forward), prepend=True, with_kwargs=True
        )
        self._handles.append(before)
        if self.settings["print_struct"]:
            names = model_names(model)
            for path, module in model.named_modules():
                self._handles.append(module.register_forward_hook(self._note_shapes(names(path))))
        self._watch(monitor.parameters)
        # a model that is compiled from within its forward calls hooks that are installed after its first call
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        self._handles.append(optimizer.register_step_pre_hook(untraced(self._before_update)))
        self._handles.append(optimizer.register_step_post_hook(untraced(self._after_update)))

    def _watch(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in named:
            hook = self._after_gradient(name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Remove every hook. The rows of a step that the optimizer skipped are written."""
        if self._running and self._backward and self.micro_batch >= self.grad_acc_steps:
            self._end_skipped()
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def _monitor(self) -> Monitor:
        assert self.monitor is not None
        return self.monitor

    # -- hooks

    @harmless
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            if not module.training:
                self._ignored = "it was in eval mode; fix: call model.train() before training"
            return
        if self._updating:  # a further call of the closure
            return
        if self._skipped():
            self._end_skipped()
        if not self._running:
            self._begin(args, kwargs)
        self.micro_batch += 1

    def _begin(self, args: Any, kwargs: Any) -> None:
        monitor = self._monitor
        if self.dynamic:
            self._reload()
        self._running, self.micro_batch, self._backward = True, 0, None
        self._observed = True
        monitor.begin(self.iteration)
        self._watch(monitor.new_parameters())
        if not self._active or not ranks_wanted(self.settings):
            monitor.now = ()
        watch = self._open.enter_context(monitor.forward())
        if watch:
            watch.root_runs(args, kwargs)

    def _skipped(self) -> bool:
        """Whether backward of every micro-batch ran, and its gradients were changed since or are gone."""
        if not self._running or self._updating or self._backward is None:
            return False
        parameter, after = self._backward
        return self.micro_batch >= self.grad_acc_steps and self._state(parameter) != after

    def _end_skipped(self) -> None:
        self._leave()
        self._write()
        print(
            f"monitor: step {self._monitor.current}: the optimizer made no step after backward, as with GradScaler at "
            "Inf or NaN; the step has rows of activations and grad_unreduced alone",
            flush=True,
        )

    @harmless
    def _leave(self) -> None:
        """End what the hooks of the step entered."""
        self._open.close()

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
            monitor.configure(monitor_config(self.settings, self._names))
            self._active = self.settings["dynamic_on"]
        except (OSError, NumericsError) as error:
            print(f"monitor: {' '.join(str(error).split())}; the former configuration stays", flush=True)

    def _after_gradient(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            if self._updating or not self._running:
                return
            self._backward = (parameter, self._state(parameter))
            last = self.micro_batch % self.grad_acc_steps == 0
            if last and self._monitor.wants("grad_unreduced", name):
                try:
                    gradient = self._gradient(parameter)
                    if gradient is not None:
                        self._monitor.pending.replace(("grad_unreduced", name), local(gradient))
                except Exception as error:
                    self._monitor.pending.fail(("grad_unreduced", name), error)

        return torch.compiler.disable(hook)

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        found: Tensor | None = getattr(parameter, "main_grad", None) if self.main_grad else parameter.grad
        return found

    def _state(self, parameter: Tensor) -> Any:
        """Return the identity and version of a gradient, which any change of it changes."""
        gradient = self._gradient(parameter)
        return None if gradient is None else (id(gradient), gradient._version)

    @harmless
    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure) and self._backward is None:  # forward and backward follow, within the step

            def observed() -> Any:
                loss = closure()
                if not self._updating:
                    self._read_gradients(optimizer)
                return loss

            return (args[0], observed, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}
        self._read_gradients(optimizer)
        return None

    @harmless
    def _read_gradients(self, optimizer: Any) -> None:
        if not self._running:  # a step without forward of the model
            why = (
                self._ignored
                or "it was not called; fix: pass the module that the script calls to set_monitor"
            )
            if not self._observed:
                self._say(f"the optimizer made a step and no forward of the model was observed: {why}")
            return
        self._updating = True
        self._open.close()
        monitor = self._monitor
        named = [(name, self._gradient(parameter)) for name, parameter in monitor.parameters]
        monitor.read("grad_reduced", named)
        self._open.enter_context(monitor.update())

    @harmless
    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._running:
            return
        self._leave()
        wanted = [kind for target in self._monitor.now for kind in target.kinds]
        rows = self._write()
        if wanted and not self._compared:
            self._compared = True
            self._report_missing([kind for kind in dict.fromkeys(wanted) if kind not in rows], optimizer)
        if self.settings["print_struct"]:
            print(json.dumps(self._shapes, indent=4), flush=True)
            raise SystemExit(0)

    def _write(self) -> dict[str, Any]:
        """Write the rows of the step, which ends, and return them."""
        self._running = self._updating = False
        self._backward = None
        self.iteration += 1
        return self._monitor.finish()

    def _say(self, line: str) -> None:
        """Print a line once."""
        if line not in self._said:
            self._said.add(line)
            print(f"monitor: {line}", flush=True)

    def _report_missing(self, kinds: Sequence[str], optimizer: Any) -> None:
        """Print one line on each kind without a tensor in the first monitored step."""
        for kind in kinds:
            if kind == "mg_direction" and self._monitor.current == 0:
                continue  # the first step has no moment before it
            reason = "no tensor of the targets has it"
            if kind in (*MOMENTS, "mg_direction"):
                reason = f"{type(optimizer).__name__} keeps no such state"
            elif kind == "attention":
                reason = "no module of the targets called scaled_dot_product_attention"
            print(
                f"monitor: step {self._monitor.current} has no {kind}: {reason}; no table is written",
                flush=True,
            )

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

"""Watch the statistics of a training run, section 4.6, from its loop, or by hooks (HookedMonitor):

    monitor = Monitor(model, optimizer, MonitorConfig(("grad", "param"), 10), Path("monitor_output"))
    for step in range(1, steps + 1):
        with monitor.step(step):            # writes the rows of the step at its end
            loss = ...; loss.backward()
            monitor.gradients("grad_reduced")
            clip(...)
            with monitor.update():
                optimizer.step()

Statistics are computed on the device and reach the host in one transfer a step. No number of the training changes.

With hooks a step ends with optimizer.step(). grad_unreduced is read when backward of the last micro-batch has summed a
gradient, and grad_reduced when optimizer.step() is called: after the reduction, and after clipping where the script
clips.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from referee.errors import NumericsError, described
from referee.numerics.describe import tensors_in
from referee.numerics.monitor.activations import ActivationWatch
from referee.numerics.monitor.monitor_tables import FIX, LAYOUT, TableWriter
from referee.numerics.monitor.statistics import Pending, update_ratio
from referee.numerics.monitor.targets import (
    KINDS,
    MOMENTS,
    WRAPPERS,
    MonitorConfig,
    MonitorTarget,
    model_names,
    parse_targets,
)
from referee.numerics.text_files import this_rank, write_json, writing

EVERYTHING = MonitorTarget("all")
OFTEN_ABSENT = ("grad_before", "data")  # kinds without a row in a sound step
FORWARD = ("actv", "actv_grad", "attention")  # kinds that need hooks during forward


class Monitor:
    """Statistics of one model on one rank, written to <folder>/rank<r>.

    extra: targets of every step, besides those of the configuration; may change between steps. replicas: the ranks with
    the same weights; by default all. scheduler: of torch; its steps are counted. gradient: where a parameter has its
    gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: MonitorConfig | None = None,
        folder: Path = Path("monitor_output"),
        rank: int = 0,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        names = model_names(model)
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.parameters = [(names(name), one) for name, one in trained]
        self.sharded = [  # parameters of which this rank has a part
            names(name) for name, one in trained if hasattr(one, "to_local") or WRAPPERS[-1] in name
        ]
        self.folder = folder / f"rank{rank}"
        self.configure(config or MonitorConfig())
        self.extra: tuple[MonitorTarget, ...] = ()
        self.now: tuple[MonitorTarget, ...] = ()  # of the running step
        self.current = 0
        self.pending = Pending()
        self.gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad
        self.replicas: tuple[int, ...] = ()
        self.scheduler: Any = None
        self.full_until = -1  # the last step in which everything is watched
        self.say: Callable[[str], None] = functools.partial(print, flush=True)
        self._before: list[Any] = []  # hooks of the running step
        self._said: set[str] = set()

    # -- what to watch

    def configure(self, config: MonitorConfig) -> None:
        """Change what is watched, from the next step on."""
        self.config, self.targets, self.collected = config, parse_targets(config.targets), 0
        self.writer = TableWriter(self.folder, config.steps_per_file, config.statistics)

    def begin(self, step: int) -> None:
        """Choose the targets of a step."""
        config = self.config
        due = step >= config.start and (step - config.start) % config.interval == 0
        due = due and self.collected < config.times
        self.collected += due
        chosen = [*(self.targets if due else ()), *self.extra]
        self.now = (EVERYTHING,) if step <= self.full_until else tuple(chosen)
        self.current, self.pending = step, Pending()
        self._watch_backward()

    def _watch_backward(self) -> None:
        """Read the gradients that parameters have when backward first reaches them; none of a sound step."""
        for name, parameter in self.parameters if self.wants("grad_before") else ():
            if self.wants("grad_before", name) and self.gradient(parameter) is not None:
                place = len(self._before)
                hook = torch.compiler.disable(functools.partial(self._left_over, name, parameter, place))
                self._before.append(parameter.register_hook(hook))

    def _left_over(self, name: str, parameter: nn.Parameter, place: int, incoming: Tensor) -> None:
        self._before[place].remove()
        self.read("grad_before", [(name, self.gradient(parameter))])

    def watch_everything(self, steps: int) -> None:
        """Watch everything in the rest of this step and in the `steps` steps after it."""
        self.now = (EVERYTHING,)
        self.full_until = max(self.full_until, self.current + steps)

    def wants(self, kind: str, name: str = "") -> bool:
        """Whether the running step includes a row; without a name, whether it includes any of the kind."""
        return any(kind in target.kinds and (not name or target.wants(kind, name)) for target in self.now)

    @property
    def wants_forward(self) -> bool:
        """Whether the running step needs hooks on the modules."""
        return any(self.wants(kind) for kind in FORWARD)

    # -- what a training loop calls

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Watch one step, and write its rows, also where it raises."""
        self.begin(step)
        try:
            with self.forward():
                yield
        finally:
            self.finish()

    @contextlib.contextmanager
    def forward(self) -> Iterator[ActivationWatch | None]:
        """Watch modules and attention calls in forward and backward, where the step includes them."""
        if not self.wants_forward:
            yield None
            return
        watch = ActivationWatch(self.pending, self.wants)
        with watch.watching(self.model, self.wants("attention")):
            yield watch

    def gradients(self, kind: str) -> None:
        """Read the gradients that the parameters have now, as a kind of tables.GRADIENTS."""
        self.read(kind, [(name, self.gradient(parameter)) for name, parameter in self.parameters])

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Read weights, moments and the size of the update. Enter around optimizer.step()."""
        before = {}
        with torch.no_grad():
            for name, parameter in self.parameters:
                if self.wants("update_ratio", name):
                    with self._noting("update_ratio", name):
                        before[name] = local(parameter).clone()
        self._rates()
        yield
        with torch.no_grad():
            for name, parameter in self.parameters:
                if name in before:
                    with self._noting("update_ratio", name):
                        ratio = update_ratio(before.pop(name), local(parameter))
                        self.pending.add_values(("update_ratio", name), ratio)
        self.weights()

    @contextlib.contextmanager
    def _noting(self, kind: str, name: str) -> Iterator[None]:
        """Note an error as the reason why a name has no row of a kind."""
        try:
            yield
        except Exception as error:
            self.pending.fail((kind, name), error)

    def _rates(self) -> None:
        """Read the rate of each group, and the steps of the scheduler so far."""
        count = getattr(self.scheduler, "_step_count", math.nan)
        for number, group in enumerate(self.optimizer.param_groups if self.optimizer else []):
            key = "learning_rate", f"group{number}"
            if self.wants(*key):
                values = [float(group.get("lr", math.nan)), count]
                self.pending.add_values(key, torch.tensor(values, dtype=torch.float64))

    def weights(self) -> None:
        """Read the weights and Adam's moments as they are now."""
        self.read("param", list(self.parameters))
        state = self.optimizer.state if self.optimizer else {}
        for kind in MOMENTS:
            self.read(kind, [(name, state.get(p, {}).get(kind)) for name, p in self.parameters])

    def read(self, kind: str, named: Sequence[tuple[str, Tensor | None]]) -> None:
        """Add the statistics of named tensors as a kind, where the step includes them."""
        for name, tensor in named:
            if tensor is not None and self.wants(kind, name):
                self.pending.add((kind, name), local(tensor))

    def finish(self) -> dict[str, list[tuple[str, Sequence[float]]]]:
        """Transfer the statistics of the step and write its rows. Returns kind -> (name, values).

        NumericsError where the folder cannot be written.
        """
        statistics, values = self.pending.take()
        rows: dict[str, list[tuple[str, Sequence[float]]]] = {}
        for (kind, name), found in statistics.items():
            rows.setdefault(kind, []).append((name, [found[one] for one in self.config.statistics]))
        for (kind, name), lines in values.items():
            rows.setdefault(kind, []).append((name, _joined(kind, lines)))
        self.now = ()
        for handle in self._before:
            handle.remove()
        self._before.clear()
        for (kind, name), problem in self.pending.problems.items():
            line = f"step {self.current}: {name} has no {kind}: {problem}; such rows are missing"
            self.say_once(line, problem)
        for kind, named in rows.items():
            self.writer.write(kind, self.current, named)
        path = self.folder / LAYOUT
        if rows and (self.replicas or self.sharded) and not path.exists():
            with writing(path, FIX):
                write_json(path, {"replicas": self.replicas, "sharded": self.sharded})
        return rows

    def say_once(self, line: str, about: str = "") -> None:
        """Print a line the first time, or the first one about something."""
        if (about or line) not in self._said:
            self._said.add(about or line)
            self.say(f"monitor: {line}")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, a plain tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = to_local() if to_local else tensor
    return found


def _joined(kind: str, lines: Sequence[Sequence[float]]) -> Sequence[float]:
    """Join the values of several calls, one for each micro-batch."""
    if kind != "attention":
        return lines[-1][: len(KINDS[kind])]
    queries = sum(line[2] for line in lines)
    entropy = sum(line[0] * line[2] for line in lines) / queries if queries else 0.0
    highs = [line[1] for line in lines]
    return (entropy, float("nan") if any(high != high for high in highs) else max(highs))


# -- any script, by hooks


def harmless(hook: Callable[..., Any]) -> Any:
    """Print an error of a hook as one line, so that the script goes on."""

    @functools.wraps(hook)
    def guarded(self: HookedMonitor, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self.say_once(f"{described(error)}; rows are missing")
            return None

    return guarded


class HookedMonitor(Monitor):
    """Watches every step of a script.

    micro_batches: of a step. start: steps before this process. prepare: is called before each step. A gradient is in
    parameter.main_grad where a parameter has it, as in Megatron.
    """

    running = False  # from the first forward of a step to the end of its update
    updating = False  # between the gradients of a step and its end
    observed = False  # whether a forward was
    backward: tuple[nn.Parameter, Any] | None = None  # a parameter, and its gradient's state after backward
    micro_batch = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: MonitorConfig,
        folder: Path,
        *,
        micro_batches: int = 1,
        start: int = 0,
        replicas: Sequence[int] = (),
        scheduler: Any = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model, optimizer, config, folder, this_rank())
        self.iteration, self.micro_batches, self.prepare = start, micro_batches, prepare
        self.replicas, self.scheduler = tuple(replicas), scheduler
        self.gradient = lambda parameter: getattr(parameter, "main_grad", parameter.grad)
        if start == 0 and any(self.folder.glob("*.csv")):
            raise NumericsError(
                f"{self.folder} has the tables of another run; fix: set MONITOR_OUTPUT_DIR to another folder, or pass "
                "start_iteration of a resumed run"
            )
        self.writer.truncate(start - 1)
        self._open = contextlib.ExitStack()
        untraced = torch.compiler.disable  # compiled code would trace a hook
        before = untraced(self._before_forward)
        self._handles = [model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]
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
        self.prepare()
        self.running = self.observed = True
        self.micro_batch, self.backward = 0, None
        self.begin(self.iteration)
        watch = self._open.enter_context(self.forward())
        if watch:
            watch.root_runs(args, kwargs)

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
        wanted = dict.fromkeys(kind for target in self.now for kind in target.kinds)
        rows = self._end_step()
        missing = [kind for kind in wanted if kind not in rows and kind not in OFTEN_ABSENT]
        if missing:
            self.say_once(
                f"{', '.join(missing)}: no rows, for no tensor of the targets has it, "
                f"{type(optimizer).__name__} keeps no such state, or no module called scaled_dot_product_attention"
            )

    def _end_step(self) -> dict[str, Any]:
        """Write the rows of the step, and return them."""
        self._open.close()
        self.running = self.updating = False
        self.backward = None
        self.iteration += 1
        return self.finish()

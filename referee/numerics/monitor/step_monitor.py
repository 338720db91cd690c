"""Watch the statistics of a training run, section 4.6.

    monitor = StepMonitor(model, optimizer, MonitorConfig(("grad", "param"), 10), Path("monitor_output"))
    for step in range(1, steps + 1):
        with monitor.step(step):            # writes the rows of the step at its end
            loss = ...; loss.backward()
            monitor.gradients("grad_reduced")
            clip(...)
            with monitor.update():
                optimizer.step()

Statistics are computed on the device and reach the host in one transfer a step. No number of the training changes.
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

from referee.numerics.dump_files import write_json, writing
from referee.numerics.monitor.activations import ActivationWatch
from referee.numerics.monitor.monitor_settings import MonitorConfig
from referee.numerics.monitor.statistics import Pending, update_ratio
from referee.numerics.monitor.tables import FIX, KINDS, LAYOUT, MOMENTS, TableWriter
from referee.numerics.monitor.targets import WRAPPERS, MonitorTarget, model_names, parse_targets

EVERYTHING = MonitorTarget("all")
FORWARD = ("actv", "actv_grad", "attention")  # kinds that need hooks during forward


class StepMonitor:
    """Statistics of one model on one rank, written to <folder>/rank<r>.

    extra: targets of every step, besides those of the configuration; may change between steps. replicas: the ranks with
    the same weights; by default all. schedule: returns the rates of the optimizer's groups that are right in the
    running step. scheduler: of torch; its steps are counted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: MonitorConfig | None = None,
        folder: Path = Path("monitor_output"),
        rank: int = 0,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config or MonitorConfig()
        names = model_names(model)
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self.parameters = [(names(name), one) for name, one in trained]
        self.sharded = [  # parameters of which this rank has a part
            names(name) for name, one in trained if hasattr(one, "to_local") or WRAPPERS[-1] in name
        ]
        self.folder = folder / f"rank{rank}"
        self.configure(self.config)
        self.extra: tuple[MonitorTarget, ...] = ()
        self.now: tuple[MonitorTarget, ...] = ()  # of the running step
        self.current = 0
        self.pending = Pending()
        self.gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad
        self.replicas: tuple[int, ...] = ()
        self.schedule: Callable[[], Sequence[float]] | None = None
        self.scheduler: Any = None
        self._before: list[Any] = []  # hooks of the running step
        self.full_until = -1  # the last step in which everything is watched
        self.say: Callable[[str], None] = functools.partial(print, flush=True)
        self._said: set[str] = set()  # problems that were printed

    # -- what to watch

    def configure(self, config: MonitorConfig) -> None:
        """Change what is watched, from the next step on."""
        self.config, self.targets, self.collected = config, parse_targets(config.targets), 0
        self.writer = TableWriter(self.folder, config.steps_per_file, config.statistics, config.digits)

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
                hook = torch.compiler.disable(
                    functools.partial(self._left_over, name, parameter, len(self._before))
                )
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
        pairs = []
        with torch.no_grad():
            for name, parameter in self.parameters:
                if self.wants("update_ratio", name):
                    with self._noting("update_ratio", name):
                        pairs.append((name, local(parameter).clone(), parameter))
        self._rates()
        yield
        with torch.no_grad():
            for name, before, parameter in pairs:
                with self._noting("update_ratio", name):
                    ratio = update_ratio(before, local(parameter))
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
        """Read the rate of each group, that of the schedule, and the steps of the scheduler so far."""
        groups = self.optimizer.param_groups if self.optimizer else []
        expected = self.schedule() if self.schedule else [math.nan] * len(groups)
        count = getattr(self.scheduler, "_step_count", math.nan)
        for number, (group, wanted) in enumerate(zip(groups, expected, strict=True)):
            if self.wants("learning_rate", f"group{number}"):
                values = [float(group.get("lr", math.nan)), wanted, count]
                key = "learning_rate", f"group{number}"
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

    def finish(self, write: bool = True) -> dict[str, list[tuple[str, Sequence[float]]]]:
        """Transfer the statistics of the step and write its rows. Returns kind -> (name, values).

        NumericsError where the folder cannot be written.
        """
        moments, values = self.pending.take()
        rows: dict[str, list[tuple[str, Sequence[float]]]] = {}
        for (kind, name), found in moments.items():
            rows.setdefault(kind, []).append((name, [found.statistic(one) for one in self.config.statistics]))
        for (kind, name), lines in values.items():
            rows.setdefault(kind, []).append((name, _joined(kind, lines)))
        self.now = ()
        for handle in self._before:
            handle.remove()
        self._before.clear()
        self._report()
        for kind, named in rows.items():
            if write:
                self.writer.write(kind, self.current, named)
        if write and rows:
            self._write_layout()
        return rows

    def _write_layout(self) -> None:
        """Write which ranks have the same weights and which parameters are parts, where that is not all and none."""
        path = self.folder / LAYOUT
        if (self.replicas or self.sharded) and not path.exists():
            with writing(path, FIX):
                write_json(path, {"replicas": self.replicas, "sharded": self.sharded})

    def _report(self) -> None:
        """Print one line on each reason why a tensor could not be read, the first time."""
        for (kind, name), problem in self.pending.problems.items():
            if problem not in self._said:
                self._said.add(problem)
                self.say(
                    f"monitor: step {self.current}: {name} has no {kind}: {problem}; such rows are missing"
                )


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

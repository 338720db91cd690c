"""Monitor a run of the trainer: CONFIG_MONITOR.

    <run>/monitor/rank<r>/       tables (referee.numerics.monitor.monitor_tables)
    <run>/monitor/control.json   targets that `make monitor` switched on
    <run>/monitor/triggers.jsonl triggers that fired: {"step", "trigger", "reason", "checkpoint"}
    <run>/monitor/caught/step<k>/rank<r>/   the tables of a step in which a trigger fired
    <run>/anomaly/               the checkpoint before a trigger, from which `make record` replays the step

Triggers are examined after the gradients are reduced and before the update, so gradients, weights and moments of the
first wrong step are still there. A monitor that cannot write ends no run: it notes the reason and stops.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.cpu_linear import standard_kernels
from gpt2.loss import IGNORED, Loss
from gpt2.training_step import StepObserver, Stepper
from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LOSS as LOSS_SPIKE
from referee.numerics.diagnose.spikes import NORM, RECENT, WINDOW, Outlier
from referee.numerics.monitor.monitor import Monitor
from referee.numerics.monitor.monitor_tables import TableWriter
from referee.numerics.monitor.targets import (
    CONTROL,
    TRIGGERED,
    ChangedFile,
    ModelNames,
    MonitorConfig,
    MonitorTarget,
    parse_triggers,
    read_control,
    read_triggers,
)
from referee.numerics.search.fix_words import UPDATES, Applied, fix
from referee.numerics.search.fixed_modules import cross_entropy
from runtime import checkpoint, ranks
from runtime.errors import UserError, out_of_memory
from runtime.metrics_log import read_steps
from runtime.run_record import ANOMALY
from runtime.settings import MonitorSettings

QUANTITIES = {"spike": LOSS_SPIKE, "grad_norm": NORM}  # of triggers
FOLDER, CAUGHT = "monitor", "caught"
MOST_KEPT = 2  # checkpoints of anomalies
MOST_NOTES = 3  # of triggers in run.json


class SpikeDetector:
    """Detector of spikes over the last losses, in nats. The checkpoint must save `losses` and `spikes`.

    spikes: [iteration, loss, expected loss].
    """

    def __init__(self, losses: Sequence[float] = (), spikes: Sequence[list[float]] = ()) -> None:
        self._outlier = Outlier(LOSS_SPIKE, values=losses)
        self.spikes = list(spikes)

    @property
    def losses(self) -> list[float]:
        return list(self._outlier.values)

    def observe(self, loss: float) -> float | None:
        """Append `loss`; return the expected loss, the median of the last few, if `loss` is a spike, else None."""
        recent = self.losses[-RECENT:]
        return None if self._outlier.observe(loss) is None else median(recent)

    def summary(self, warmup: int) -> str | None:
        """Return a note on the spikes after the warm-up iterations, where a loss often rises; None without any."""
        spikes = [spike for spike in self.spikes if spike[0] > warmup]
        if not spikes:
            return None
        iteration, loss, expected = max(spikes, key=lambda spike: spike[1] - spike[2])
        largest = f"{iteration}: {loss:.2f}, expected {expected:.2f}"
        return f"loss spikes: {len(spikes)}; the largest at iteration {largest}"


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


class RunMonitor(StepObserver):
    """Watches the steps of one run on this rank."""

    def __init__(
        self,
        settings: MonitorSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        directory: Path,
        note: Callable[[str], None],
    ) -> None:
        self.settings, self.directory, self.note = settings, directory, note
        self.folder = directory / FOLDER
        config = MonitorConfig(settings.targets, settings.interval, start=1)
        self.triggers = Triggers(settings.triggers)
        self.monitor = Monitor(model, optimizer, config, self.folder, ranks.rank())
        self.monitor.say = note
        self.control = ChangedFile(self.folder / CONTROL)
        self.broken = False
        self.fired: list[Fired] = []  # in the running step
        self.windows: list[tuple[int, int]] = []  # steps in which everything is watched, of earlier processes
        self.notes = 0

    def resume(self, iteration: int) -> None:
        """Drop the rows after `iteration`, which are written again, and recall the losses before it.

        Targets that match nothing of this model are noted: they may match in another arm of the study.
        """
        if not iteration:  # a checkpoint has the note
            self._note_unmatched(self.monitor.targets)
        with self._harmless():
            self.monitor.writer.truncate(iteration)
        steps = [line for line in read_steps(self.directory / "metrics.jsonl") if line.iteration <= iteration]
        for line in steps[-(WINDOW + RECENT) :]:
            norm = math.nan if line.grad_norm is None else line.grad_norm
            self.triggers.observe(line.iteration, line.loss, norm)
        after = self.settings.full_steps
        found = read_triggers(self.folder)
        # a step that went wrong is repeated from the checkpoint: everything of it is watched, from one step before
        self.windows = [
            (entry["step"] - 1, entry["step"] + after) for entry in found if entry["step"] > iteration
        ]

    def _note_unmatched(self, targets: Sequence[MonitorTarget]) -> None:
        if targets and ranks.first():
            names = ModelNames.of(self.monitor.model)
            for problem in filter(None, map(names.problem, targets)):
                self.note(f"monitor: {problem}")

    # -- the points of a step

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.fired = []
        if self.broken:
            yield
            return
        try:
            if self.control.changed():
                targets = read_control(self.folder)
                self._note_unmatched([one for one in targets if one not in self.monitor.extra])
                self.monitor.extra = targets
        except NumericsError as error:
            if ranks.first():
                self.note(f"monitor: {error}; the targets stay as they were")
        self.monitor.begin(number)
        if any(first <= number <= last for first, last in self.windows):
            self.monitor.watch_everything(0)
        try:
            yield
        finally:
            with self._harmless():
                self._finish(number)

    @contextlib.contextmanager
    def forward(self, repeat: Callable[[], None] | None) -> Iterator[None]:
        watched = not self.broken and self.monitor.wants_forward
        if watched and repeat:
            try:
                with self.monitor.forward():
                    repeat()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self._stop("activations need a second pass without torch.compile, which ran out of memory")
        with self.monitor.forward() if watched and not repeat else contextlib.nullcontext():
            yield

    def unreduced(self) -> None:
        if ranks.world() > 1:
            self._gradients("grad_unreduced")

    def reduced(self, loss: float, gradient_norm: float) -> None:
        self.fired = self.triggers.observe(self.monitor.current, loss, gradient_norm)
        if self.fired and not self.broken:
            self.monitor.watch_everything(self.settings.full_steps)
            self._report()
        self._gradients("grad_reduced")
        if any(fired.trigger == "nan" for fired in self.fired) and not self.broken:
            self.monitor.weights()  # no update follows

    def clipped(self) -> None:
        self._gradients("grad_clipped")

    def update(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.broken else self.monitor.update()

    def _gradients(self, kind: str) -> None:
        if not self.broken:
            self.monitor.gradients(kind)

    # -- files

    def _finish(self, number: int) -> None:
        rows = self.monitor.finish()
        if not self.fired:
            return
        folder = self.folder / CAUGHT / f"step{number}" / f"rank{ranks.rank()}"
        shutil.rmtree(folder, ignore_errors=True)  # of the same step in an earlier process
        writer = TableWriter(folder, 1)
        for kind, lines in rows.items():
            writer.write(kind, number, lines)

    def _report(self) -> None:
        """Keep the newest checkpoint, and write the triggers of this step. The first rank does so."""
        if not ranks.first():
            return
        step, reasons = self.fired[0].step, "; ".join(f"{one.trigger}: {one.reason}" for one in self.fired)
        kept = None
        with self._harmless():
            kept = keep_checkpoint(self.directory)
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / TRIGGERED).open("a", encoding="utf-8") as file:
                for one in self.fired:
                    entry = {"step": step, "trigger": one.trigger, "reason": one.reason, "checkpoint": kept}
                    file.write(json.dumps(entry) + "\n")
        self.notes += 1
        if self.notes <= MOST_NOTES:
            more = f"; further ones are in {FOLDER}/{TRIGGERED}" if self.notes == MOST_NOTES else ""
            self.note(
                f"monitor: step {step}: {reasons}; everything is monitored for {self.settings.full_steps} steps; "
                f"replay it with make record RUN={self.directory} STEP={step}{more}"
            )

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Stop the monitor after an error of its files, and not the run."""
        try:
            yield
        except (NumericsError, OSError) as error:
            self._stop(f"{error}".partition("; fix")[0])

    def _stop(self, reason: str) -> None:
        if not self.broken:
            self.note(f"monitor: it stopped after step {self.monitor.current}: {reason}")
        self.broken = True


def keep_checkpoint(directory: Path) -> str | None:
    """Link the newest checkpoint of a run into its folder of anomalies. Returns its path in the run; None without one.

    It needs no space while the original exists. The first MOST_KEPT remain.
    """
    found = checkpoint.complete(directory / "checkpoint")
    if not found:
        return None
    kept = directory / ANOMALY / found[-1].name
    if kept.is_dir():
        return f"{ANOMALY}/{kept.name}"
    if len(checkpoint.complete(directory / ANOMALY)) >= MOST_KEPT:
        return None
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(found[-1], temporary, copy_function=_link)
    temporary.rename(kept)
    return f"{ANOMALY}/{kept.name}"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def start_monitor(
    settings: MonitorSettings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    iteration: int,
    note: Callable[[str], None],
) -> StepObserver:
    """Return the monitor of a run that begins or resumes after `iteration`. Where it is off, it watches nothing."""
    if not settings.enabled:
        return StepObserver()
    monitor = RunMonitor(settings, model, optimizer, directory, note)
    monitor.resume(iteration)
    return monitor


LOSS = "loss"  # name of the loss in a pattern
SMALL_LOSS = (f"small:{LOSS}", "small:cross_entropy")
SYMBOL = "CONFIG_NUMERICS_FIX"


class StepLoss(nn.Module):
    """The loss of a step as a module, so that a pattern can name it."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
        return self.function(hidden_BTC, head_VC, targets_BT, vocabulary)


def small_loss(hidden_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
    """Compute linear_cross_entropy by one product and small operations, with all logits in memory."""
    logits_BTV = F.linear(hidden_BTC, head_VC[:vocabulary])
    wide = logits_BTV if logits_BTV.element_size() > 4 else logits_BTV.float()
    return cross_entropy(wide.flatten(0, -2), targets_BT.flatten(), ignore_index=IGNORED)


class RunFixes:
    """The fixes of a run's model, loss and optimizer. UserError names a wrong word."""

    def __init__(self, stepper: Stepper, words: str) -> None:
        self.stepper, self.loss = stepper, stepper.loss
        given = words.split()
        small = [word for word in given if word in SMALL_LOSS]
        loss = StepLoss(small_loss if small else stepper.loss)
        try:
            self.applied: Applied = fix(
                stepper.model,
                [word for word in given if word not in SMALL_LOSS],
                optimizer=stepper.optimizer,
                others={LOSS: loss},
                around=standard_kernels,
            )
        except NumericsError as error:
            raise UserError(f"{SYMBOL}: {error}") from error
        changes = [*map(str, self.applied.changes)]
        changes += [f"{LOSS} by small operations"] if small else []
        changes += [UPDATES[word] for word in self.applied.updates]
        self.changes = tuple(changes) or None  # as on the record
        if small or any(change.path == LOSS for change in self.applied.changes):
            stepper.loss = loss

    def require_used(self) -> None:
        """Raise UserError where a fix had no effect in a step."""
        try:
            self.applied.require_used()
        except NumericsError as error:
            raise UserError(f"{SYMBOL}: {error}") from error

    def undo(self) -> None:
        """Restore model, loss and optimizer."""
        self.applied.undo()
        self.stepper.loss = self.loss


def check_fixes(model: nn.Module, words: str, device_type: str = "") -> None:
    """Raise UserError for a word that names nothing of the model, which is unchanged.

    device_type: of the runs; "" if unknown. A computation is not moved to the CPU where it is there without a fix.
    """
    without_names = (*SMALL_LOSS, *UPDATES)
    given = [word for word in words.split() if word not in without_names]
    try:
        fix(model, given, others={LOSS: StepLoss(small_loss)}).undo()
    except NumericsError as error:
        raise UserError(f"{SYMBOL}: {error}") from error
    for word in given:
        if device_type == "cpu" and word.startswith("cpu:"):
            raise UserError(f"{SYMBOL}: {word} has no effect: the runs compute on the CPU; fix: remove it")

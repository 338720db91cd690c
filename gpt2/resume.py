"""Resume a run from its newest checkpoint: check that it belongs to the run and fits its model, and restore it.

A run without a checkpoint begins at iteration 0, or where the decay of the shorter run that it continues began.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpt2.clocks import Clocks
from gpt2.evaluator import Evaluator
from gpt2.nan_debug import FaultLog
from gpt2.training_step import Stepper
from gpt2.transformer import restore_step
from gpt2.watch import SpikeDetector, start_monitor
from runtime import checkpoint, ranks
from runtime.checkpoint import CheckpointError, LoadedCheckpoint
from runtime.errors import UserError
from runtime.metrics_log import MetricsLog, MetricsSum, metrics_sum, truncate_metrics
from runtime.records import Count, InvalidJsonError, Record, parse, to_plain
from runtime.resolved_target import ResolvedTarget
from runtime.run_plan import RunPlan, Start
from runtime.run_record import Clock, Evaluation, LearnedPoint, RunRecord, ScalarPoint, Spike
from runtime.settings import Config
from runtime.signals import Stop

# Settings of torch's optimizer, which differ between versions of torch. `load_state_dict` completes them.
GROUP_SETTING = re.compile(r"optimizer\.param_groups\.[0-9]+\.(?!params|lr_multiplier)")


RESTART = "set another CONFIG_STUDY_NAME, or delete {} to train it from the start"


class RunError(UserError, RuntimeError):
    """The run cannot resume from its checkpoint."""


class Meta(Record, frozen=True):
    """meta.json of a checkpoint. of: identity of the run. watch: the last losses, for the spike detector.

    metrics: of metrics.jsonl, whose later lines are written again.
    """

    iteration: Count
    of: Mapping[str, Any]
    cut: bool
    timed_steps: Count
    losses: tuple[Evaluation, ...]
    learned: tuple[LearnedPoint, ...]
    notes: tuple[str, ...]
    watch: tuple[float, ...]
    spikes: tuple[Spike, ...]
    clocks: Clock
    scalars: tuple[ScalarPoint, ...]
    metrics: MetricsSum


class Resumable(Protocol):
    """What a gpt2.trainer.TrainingRun restores."""

    directory: Path
    plan: RunPlan
    config: Config
    resolved: ResolvedTarget
    device: str
    stop: Stop
    clocks: Clocks
    stepper: Stepper
    evaluator: Evaluator
    log: MetricsLog
    spikes: SpikeDetector
    faults: FaultLog
    iteration: int
    timed_steps: int
    truncated: bool

    def check_fits(self, loaded: LoadedCheckpoint) -> None: ...
    def identity(self) -> dict[str, Any]: ...
    def ended(self) -> bool: ...
    def note(self, message: str) -> None: ...


def resume(run: Resumable) -> None:
    """Load the newest complete checkpoint of the run, if there is one, and start its monitor."""
    plan, directory = run.plan, run.directory
    directory.mkdir(parents=True, exist_ok=True)
    loaded = checkpoint.load_latest(directory / "checkpoint", run.check_fits)
    loaded = loaded or checkpoint.load_latest(directory / "stable", run.check_fits)
    identity = run.identity()
    if plan.start and not loaded:
        loaded = load_shorter(run, plan.start)
        identity |= {"iterations": plan.start.iterations, "schedule": plan.start.schedule}
    before = run.log.last_record()
    if loaded:
        meta = refuse_another_run(loaded, identity, plan.run, directory)
        if ranks.first():  # it has the file; another rank could read an unfinished copy
            refuse_altered_metrics(meta.metrics, directory / "metrics.jsonl")
        restore(run, loaded, meta, before)
    run.faults = FaultLog(before.faults if before else ())
    if run.ended() and before and before.target:  # this process observes no step
        run.log.record["target"]["attention_backend"] = before.target.attention_backend
    same = run.identity() | {"resumed iteration": run.iteration, "device": run.resolved.device_name}
    ranks.require_equal(same, "use one shared results folder, the same data and the same cards on every host")
    if ranks.first():
        evaluated = [int(row[0]) for row in run.evaluator.losses]
        truncate_metrics(directory / "metrics.jsonl", run.iteration, evaluated)
    stepper = run.stepper
    stepper.observer = start_monitor(
        run.config.monitor, stepper.model, stepper.optimizer, directory, run.iteration, run.note
    )
    ranks.together(run.stop.check)


def load_shorter(run: Resumable, start: Start) -> LoadedCheckpoint:
    """Load the state in which the decay of the shorter run began, and copy the losses before it."""
    loaded = checkpoint.load_latest(start.directory / "stable", run.check_fits)
    if loaded is None:
        raise CheckpointError(
            f"{start.directory / 'stable'} has no checkpoint to continue; fix: restore that folder from a copy"
        )
    if ranks.first():
        shutil.copyfile(start.directory / "metrics.jsonl", run.directory / "metrics.jsonl")
    return loaded


def restore(run: Resumable, loaded: LoadedCheckpoint, meta: Meta, before: RunRecord | None) -> None:
    """Set the run to the state of a checkpoint. before: the last record of an earlier process."""
    run.stepper.load_state(loaded.state)
    run.iteration, run.truncated, run.timed_steps = meta.iteration, meta.cut, meta.timed_steps
    restore_step(run.stepper.model, run.iteration)
    run.evaluator.restore(to_plain(meta))
    run.log.notes = [*meta.notes, *loaded.skipped]
    run.spikes = SpikeDetector(meta.watch, to_plain(meta.spikes))
    run.clocks.add(clocks_before(meta, before))
    threads = before.environment.threads if before and before.environment else None
    now = run.log.record["environment"]["threads"]
    if run.device == "cpu" and threads not in (None, now):
        run.log.notes.append(
            f"resumed at iteration {run.iteration} with {now} threads, before with {threads}: later numbers "
            "differ by rounding"
        )


def check_fits(
    loaded: LoadedCheckpoint,
    iterations: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise CheckpointError for more than `iterations`, or for entries of other names, shapes or types."""
    if loaded.iteration > iterations:
        raise CheckpointError(f"checkpoint {loaded.path} is beyond the {iterations} iterations of the run")
    found = _kinds(loaded.state)
    expected = _kinds({"model": model.state_dict()})
    if optimizer:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = {
            number: {"step": torch.tensor(0.0), "exp_avg": parameter, "exp_avg_sq": parameter}
            for number, parameter in enumerate(parameters)
            if f"optimizer.state.{number}.step" in found  # absent: the parameter had no gradient yet
        }
        groups = optimizer.state_dict()["param_groups"]
        expected |= _kinds({"optimizer": {"state": moments, "param_groups": groups}})
    else:
        found = {name: kind for name, kind in found.items() if name.startswith("model.")}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name) and not GROUP_SETTING.match(name):
            raise CheckpointError(
                f"checkpoint {loaded.path} does not fit the model: {name} is {found.get(name, 'missing')}; "
                f"{expected.get(name, 'no such entry')} expected"
            )


def _kinds(value: Any, name: str = "") -> dict[str, str]:
    """Return name -> type, and shape of a tensor, of every value in nested dictionaries and lists."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [_kinds(item, f"{name}.{key}" if name else f"{key}") for key, item in items]
        return {inner: kind for part in parts for inner, kind in part.items()}
    if isinstance(value, Tensor):
        return {name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"}
    return {name: type(value).__name__}


def refuse_another_run(loaded: LoadedCheckpoint, now: dict[str, Any], run: str, directory: Path) -> Meta:
    """Return the plain data of the checkpoint of a run.

    Raises RunError where the checkpoint has other data, weights, settings or another length.
    now: the values that must agree between two processes of the run.
    """
    try:
        meta = parse(Meta, loaded.meta, "meta.json")
    except InvalidJsonError as error:
        raise RunError(
            f"the checkpoint of {run} at iteration {loaded.iteration} cannot be continued: {error}; fix: "
            f"{RESTART.format(directory)}"
        ) from error
    refuse_differing(meta.of, {"numerics_fix": None} | now, run, directory)  # absent where it is not set
    return meta


def refuse_differing(before: Mapping[str, Any], now: Mapping[str, Any], run: str, directory: Path) -> None:
    """Raise RunError where the checkpoint of a run has another value of what must agree in all processes of the run."""
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        shown = ", ".join(
            f"{name} ({before.get(name)} -> {now[name]})" if "iterations" in name else name
            for name in differing
        )
        raise RunError(
            f"{run} was started with another {shown}, so it cannot resume from its checkpoint; fix: restore the former "
            f"value, or {RESTART.format(directory)}"
        )


def refuse_altered_metrics(recorded: MetricsSum, path: Path) -> None:
    """Raise RunError where the losses before the checkpoint are not those that were written."""
    found = metrics_sum(path, recorded.bytes)
    if found != recorded:
        raise RunError(
            f"{path} was altered or cut: SHA-256 of its first {recorded.bytes} bytes is {found.sha256[:12]}; the "
            f"checkpoint records {recorded.sha256[:12]}; fix: restore the file from a copy, or delete {path.parent} "
            "and run `make`"
        )


def clocks_before(meta: Meta, written: RunRecord | None) -> dict[str, float]:
    """Return the clocks at the checkpoint in seconds. The record written after it includes the time of saving."""
    clocks = meta.clocks.to_json()
    if written and written.clock and written.progress and written.progress.iterations == meta.iteration:
        recorded = written.clock.to_json()
        return {name: max(clocks[name], recorded[name]) for name in clocks}
    return clocks

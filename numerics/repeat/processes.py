"""Run a step in fresh processes: in the same environment, and with launches that block."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from numerics.errors import NumericsError
from numerics.repeat.conditions import (
    BLOCKING,
    FRESH,
    Condition,
    Conditions,
    run_once,
    threads,
)
from numerics.repeat.trace import Trace
from numerics.replayed_step import ReplayedStep

LAUNCH_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1", "HIP_LAUNCH_BLOCKING": "1", "ASCEND_LAUNCH_BLOCKING": "1"}
FRESH_PROCESSES = 2


def fresh_conditions(
    command: Sequence[str], conditions: Conditions, environment: Mapping[str, str] | None = None
) -> dict[str, Condition]:
    """Start the command in fresh processes and read their traces.

    command: runs `child` of this module with three more arguments: file of traces, threads, repetitions.
    """
    blocking = torch.accelerator.is_available()
    total = FRESH_PROCESSES + blocking
    fresh = Condition(FRESH, conditions.many)
    for number in range(FRESH_PROCESSES):
        conditions.progress(FRESH, number, total)
        fresh.traces += _traces(command, conditions.many, 1, dict(environment or os.environ))
    found = {FRESH: fresh}
    if blocking:
        conditions.progress(BLOCKING, FRESH_PROCESSES, total)
        variables = dict(environment or os.environ) | LAUNCH_BLOCKING
        traces = _traces(command, conditions.many, conditions.times, variables)
        found[BLOCKING] = Condition(BLOCKING, conditions.many, traces)
    return found


def _traces(command: Sequence[str], count: int, times: int, environment: Mapping[str, str]) -> list[Trace]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traces.pickle"
        done = subprocess.run(
            [*command, str(file), str(count), str(times)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not file.exists():
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise NumericsError(
                f"a fresh process failed: {reason}; fix: run {' '.join(command)} to see the error"
            )
        traces: list[Trace] = pickle.loads(file.read_bytes())  # written by this program just now
    return traces


def child(step: ReplayedStep, file: str, count: str, times: str) -> None:
    """Repeat the step in this fresh process and write its traces."""
    conditions = Conditions(step, int(times), int(count), None)
    with threads(int(count)):
        run_once(step, None)  # caches that the first call builds
        traces = [run_once(step, conditions.observer()) for _ in range(int(times))]
    Path(file).write_bytes(pickle.dumps(traces))

"""`make bench PROFILE=1`: where the time of a step goes, operation by operation, in ours and in the plain step.

python -m scripts.bench_profile [--rounds STEPS] [--shape NAME]   writes results/bench-profile.json after every case
python -m scripts.bench_profile --case JSON                       one case, in a process of its own
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.cases import Shape
from bench.workers import FIRST_ANSWER, BenchError, surroundings, why
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import UserError, run_command
from scripts.bench import at_least, keep, tell

OUT = Path("results/bench-profile.json")
CASES = ("plain", "B", "RALEARN")
SHOWN = 20  # operations of the table
PATIENCE = 60.0  # seconds that a step may take, looked at, beside those before the first answer


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench PROFILE=1")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are looked at")
    parser.add_argument("--shape", default="", help="the first shape whose name contains this")
    parser.add_argument("--case", default="")
    arguments = parser.parse_args()
    export_environment()
    if arguments.case:
        print(json.dumps(profile(**json.loads(arguments.case))))
        return 0
    at_least(1, arguments.rounds)
    from bench import runner as bench
    from gpt2.config.config import ANY_TARGET
    from gpt2.hardware import resolve

    resolved = resolve.resolve(ANY_TARGET)
    kind = resolved.device_type
    shape = bench.chosen(kind, arguments.shape, ())[0]
    micro = dict(shape.cases)[CASES[-1]]  # that of the variants: B and the plain step have others beside it
    tell(
        f"{resolved.device_name}, {resolved.dtype}; {shape.name}, an optimizer step of {micro} x "
        f"{shape.accumulation(micro)} sequences"
    )
    found: dict[str, dict[str, Any]] = {}
    whole = {"shape": shape.name, "micro": micro, "accumulation": shape.accumulation(micro), "cases": found}
    for case in CASES:
        try:
            found[case] = in_a_process(shape, case, micro, arguments.rounds)
        except BenchError as error:
            tell(f"left out: {error}")
            continue
        keep(OUT, resolved, whole, complete=False)
    if not found:
        raise UserError("nothing could be profiled; why each case was left out stands above")
    tell(text(found))
    keep(OUT, resolved, whole)
    return 0


def in_a_process(shape: Shape, case: str, micro: int, steps: int) -> dict[str, Any]:
    """`profile` in a new process with the heap that the case has in `make bench`; BenchError where it fails."""
    asked = {"shape": dataclasses.asdict(shape) | {"cases": []}, "case": case, "micro": micro, "steps": steps}
    name, limit = f"{shape.name}, {case} at micro-batch {micro}", FIRST_ANSWER + PATIENCE * steps
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.bench_profile", "--case", json.dumps(asked)],
            env=surroundings(case),
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{name}: no answer within {limit:,.0f} s, so it was ended") from None
    if done.returncode:
        raise BenchError(f"{name}: {why(done.returncode, done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def profile(shape: dict[str, Any], case: str, micro: int, steps: int) -> dict[str, Any]:
    """Seconds and page faults of a step, not profiled; then of each operation its own seconds and calls a step."""
    import torch
    from torch.profiler import ProfilerActivity

    from bench.case_step import WARM_UP, kernels, model_of, step_of
    from gpt2.config.config import ANY_TARGET
    from gpt2.train.trainer import device_synchroniser

    resolved = attention_kernels.prepare_device(ANY_TARGET, model_of(shape))
    synchronise = device_synchroniser(resolved.device)
    step, _, _ = step_of(shape, case, micro, resolved)
    gpu = resolved.device != "cpu"

    def several(count: int) -> None:
        for _ in range(count):
            step(1)
        synchronise()

    with kernels(case, resolved):
        several(WARM_UP)
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        several(steps)
        seconds = (time.perf_counter() - began) / steps
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // steps
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        with torch.profiler.profile(activities=kinds) as seen:
            several(steps)
    found = operations(seen.key_averages(), gpu, steps)
    return {"step_seconds": seconds, "page_faults": faults, "operations": found}


def operations(averages: Iterable[Any], gpu: bool, steps: int) -> list[dict[str, Any]]:
    """Of torch.profiler's averages the rows whose own times add up to the time of the steps, the longest first.

    On a CPU those are the CPU's. On a GPU they are the kernels, copies and fills that ran on it: the row of an
    operation on the CPU has the time of its kernels once more, and an annotation that of all kernels under it, so
    torch leaves both out of its own total.
    """
    from torch.autograd import DeviceType

    own = "self_device_time_total" if gpu else "self_cpu_time_total"
    counted = [
        event
        for event in averages
        if getattr(event, own) > 0
        and (not gpu or (event.device_type == DeviceType.CUDA and not event.is_user_annotation))
    ]
    rows = [
        {"name": event.key, "seconds": getattr(event, own) / 1e6 / steps, "calls": event.count / steps}
        for event in counted
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def text(found: dict[str, dict[str, Any]]) -> str:
    """The operations that take most in any case, each case's milliseconds a step and share of its operations' sum."""
    from bench.suites.growth import columns

    own = {case: {row["name"]: row for row in seen["operations"]} for case, seen in found.items()}
    total = {case: sum(row["seconds"] for row in rows.values()) for case, rows in own.items()}
    largest = {
        name: max(rows[name]["seconds"] / total[case] if name in rows else 0.0 for case, rows in own.items())
        for rows in own.values()
        for name in rows
    }
    names = sorted(largest, key=lambda name: -largest[name])[:SHOWN]

    def cell(case: str, name: str) -> str:
        row = own[case].get(name)
        return f"{1000 * row['seconds']:,.0f} ({row['seconds'] / total[case]:.1%})" if row else "-"

    rows = [(name[:60], *(cell(case, name) for case in found)) for name in names]
    rows += [("all operations", *(f"{1000 * total[case]:,.0f}" for case in found))]
    rows += [("a step, not profiled", *(f"{1000 * seen['step_seconds']:,.0f}" for seen in found.values()))]
    rows += [("page faults a step", *(f"{seen['page_faults']:,}" for seen in found.values()))]
    return columns([("ms a step (share)", *found), *rows])


if __name__ == "__main__":
    run_command(main)

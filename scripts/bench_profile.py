"""`make bench PROFILE=1`: where the time of a step goes, operation by operation, in ours and in the plain step.

python -m scripts.bench_profile [--rounds STEPS] [--shape NAME]   writes results/bench-profile.json
python -m scripts.bench_profile --case JSON                       one case, in a process of its own
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpt2.errors import UserError, run_command
from gpt2.target import export_environment
from scripts.bench import keep

OUT = Path("results/bench-profile.json")
CASES = ("plain", "B", "RALEARN")
SHOWN = 20  # operations of the table
WARM_UP = 3


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
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds}; right: at least 1")
    from gpt2 import target
    from gpt2.config import ANY_TARGET
    from study import bench

    resolved = target.resolve(ANY_TARGET)
    shapes = bench.SHAPES["cpu" if resolved.device == "cpu" else "cuda"]
    shape = next((shape for shape in shapes if arguments.shape in shape.name), None)
    if shape is None:
        raise UserError(
            f"no shape is called {arguments.shape!r}; there are {', '.join(s.name for s in shapes)}"
        )
    print(f"{resolved.device_name}, {resolved.dtype}; {shape.name}", flush=True)
    micro = dict(shape.cases)["B"]
    found = {case: in_a_process(shape, case, micro, arguments.rounds) for case in CASES}
    print(text(found))
    keep(OUT, resolved, {"shape": shape.name, "micro": micro, "cases": found})
    return 0


def in_a_process(shape: Any, case: str, micro: int, steps: int) -> dict[str, Any]:
    """`profile` in a new process with the heap that the case has in `make bench`; UserError where it fails."""
    from study.bench import PLAIN
    from study.child import KEEP_HEAP

    asked = {"shape": dataclasses.asdict(shape) | {"cases": []}, "case": case, "micro": micro, "steps": steps}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_profile", "--case", json.dumps(asked)],
        env=dict(os.environ) if case == PLAIN else {"GLIBC_TUNABLES": KEEP_HEAP} | os.environ,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{shape.name}, {case} at micro-batch {micro}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def profile(shape: dict[str, Any], case: str, micro: int, steps: int) -> dict[str, Any]:
    """Seconds and page faults of a step, not profiled; then of each operation its own seconds and calls a step."""
    import torch
    from torch.profiler import ProfilerActivity

    from gpt2 import target
    from gpt2.config import ANY_TARGET, VOCABULARY
    from gpt2.train import device_synchroniser
    from scripts.bench import model_of, our_step, plain_step
    from study.bench import PLAIN

    resolved = target.make_ready(ANY_TARGET, model_of(shape))
    synchronise = device_synchroniser(resolved.device)
    step, _, _ = (plain_step if case == PLAIN else our_step)(shape, case, micro, resolved)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(VOCABULARY, (micro, shape["block_size"] + 1), generator=generator)
    ids_BT = ids_BT.to(resolved.device)
    gpu = resolved.device != "cpu"

    def several(count: int) -> None:
        for _ in range(count):
            step(ids_BT, 1)
        synchronise()

    with target.attention_context(resolved, 0.0):
        several(WARM_UP)
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        several(steps)
        seconds = (time.perf_counter() - began) / steps
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // steps
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        with torch.profiler.profile(activities=kinds) as seen:
            several(steps)
    own = "self_device_time_total" if gpu else "self_cpu_time_total"
    operations = [
        {"name": event.key, "seconds": getattr(event, own) / 1e6 / steps, "calls": event.count / steps}
        for event in seen.key_averages()
        if getattr(event, own) > 0
    ]
    operations.sort(key=lambda row: -row["seconds"])
    return {"step_seconds": seconds, "page_faults": faults, "operations": operations}


def text(found: dict[str, dict[str, Any]]) -> str:
    """The operations that take most in any case, each case's milliseconds a step and share of its operations' sum."""
    from study.growth import columns

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

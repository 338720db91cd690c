"""One run in a process of its own; started by the study, which reads its events from standard output.

python -m scripts.train STUDY_DIR VARIANT SEED                     train, or go on from the last checkpoint
python -m scripts.train STUDY_DIR VARIANT SEED --time S --micro M  only time steps for S seconds, for the plan
    [--beside VARIANT ...]  each of these for S seconds as well, a step of each in turn
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from gpt2.hardware import attention_kernels
from gpt2.system.errors import UserError
from study.runner.child_process import (
    EXIT_DISK_FULL,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.train")
    parser.add_argument("study_dir", type=Path)
    parser.add_argument("variant")
    parser.add_argument("seed", type=int)
    parser.add_argument("--time", type=float, default=0.0)
    parser.add_argument("--micro", type=int, default=0)
    parser.add_argument("--beside", nargs="+", default=[])
    parser.add_argument(
        "--parent", type=int, default=0, help="the study's process: without it there is no run"
    )
    arguments = parser.parse_args()
    from gpt2.system.signals import Interrupted, Stop

    stop = Stop().install(arguments.parent)
    try:
        return _work(arguments, stop)
    except Interrupted:
        return EXIT_INTERRUPTED
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """One line on what ended the run, its last in the log, and the exit status for it."""
    from gpt2.system.resource_errors import disk_full, out_of_memory
    from gpt2.train.step import NotFiniteError

    status, text = EXIT_FAILED, f"{error}"
    if out_of_memory(error):
        status, text = EXIT_OUT_OF_MEMORY, f"out of memory: {error}"
    elif disk_full(error):
        status = EXIT_DISK_FULL
    elif isinstance(error, NotFiniteError) and error.retry:
        status = EXIT_NOT_FINITE
    elif not isinstance(error, UserError):
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # the log may lie on the disk that is full
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return status


def _work(arguments: argparse.Namespace, stop: object) -> int:
    from gpt2.artifacts import run_record
    from gpt2.config.batch import BatchPlan, plan_batch
    from gpt2.config.config import Config, read_symbols
    from gpt2.system.signals import Stop
    from gpt2.train.run_plan import RunPlan
    from gpt2.train.trainer import Run
    from ra.settings import AlternationSettings
    from ra.variants import variant
    from study.memory.micro_batch import Predictions, free_bytes, require_free
    from study.runner.plan import load_plan

    assert isinstance(stop, Stop)
    symbols = read_symbols(arguments.study_dir / "config")
    config = Config.from_symbols(symbols)
    model = config.model
    resolved = attention_kernels.prepare_device(config.target, model)
    alternation = AlternationSettings.from_symbols(symbols)
    chosen = variant(arguments.variant, config.model, alternation)
    with attention_kernels.attention_context(resolved, model.dropout):
        if arguments.time:
            batch = plan_batch(config.batch.effective, arguments.micro, 1, config.model.block_size)
            if resolved.device != "cpu":
                need = Predictions(config, resolved).peak_bytes(chosen, batch.micro)
                require_free(resolved, need, free_bytes(resolved.device))
            timed = {name: variant(name, config.model, alternation) for name in arguments.beside}
            attentions = {
                name: each.attention for name, each in ({arguments.variant: chosen} | timed).items()
            }
            return _time_steps(config, resolved, attentions, batch, arguments.time, stop)
        plan = load_plan(arguments.study_dir)
        if plan is None:
            raise UserError(f"{arguments.study_dir} has no plan.json; start the study with `make`")
        row, name = (
            plan["variants"][arguments.variant],
            run_record.run_name(arguments.variant, arguments.seed),
        )
        require_free(resolved, row.get("predicted_bytes"), free_bytes(resolved.device))
        run = RunPlan(
            directory=arguments.study_dir / "runs" / name,
            run=name,
            variant=arguments.variant,
            seed=arguments.seed,
            iterations=row["iterations"],
            batch=BatchPlan(**plan["batch"]),
            predicted_bytes=row.get("predicted_bytes"),
            hellaswag=hellaswag_source(arguments.study_dir),
            warmup_iterations=row.get("warmup_iterations"),
            extended=plan.get("extended", 1.0),
            time_factor=row.get("time_factor", 1.0),
        )
        status = Run(run, config, resolved, chosen.attention, stop).train()
    return EXIT_FINISHED if status == "finished" else EXIT_INTERRUPTED


def hellaswag_source(study_dir: Path) -> Path | str:
    """Where the study found HellaSwag's items, or the reason why it did not."""
    found = json.loads((study_dir / "hellaswag.json").read_text())
    return Path(found["path"]) if "path" in found else str(found["absent"])


def _time_steps(config, resolved, attentions, batch, seconds: float, stop) -> int:  # type: ignore[no-untyped-def]
    """Time whole steps on random tokens; prints {"event": "timing", "seconds": {name: [...]}, "peak_bytes": N}.

    attentions: by variant. Each makes a step in turn, so that a machine's changes of speed fall on all alike.
    """
    import torch

    from gpt2.artifacts.metrics_log import print_event
    from gpt2.train.peak_memory import PeakMeter
    from gpt2.train.step import Stepper
    from gpt2.train.trainer import WARM_UP_STEPS, device_synchroniser

    meter, synchronise = PeakMeter(resolved.device), device_synchroniser(resolved.device)
    steppers = {
        name: Stepper(
            config.model,
            config.optimizer,
            batch,
            seed=0,
            device=resolved.device,
            dtype=resolved.dtype,
            compile=config.target.compile,
            attention=attention,
        )
        for name, attention in attentions.items()
    }
    shape = (batch.effective, batch.block_size + 1)
    ids_ET = torch.randint(config.model.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    ids_ET = ids_ET.to(resolved.device)
    samples: dict[str, list[float]] = {name: [] for name in steppers}
    turns, began = 0, time.perf_counter()
    while turns < WARM_UP_STEPS + 3 or time.perf_counter() - began < seconds * len(steppers):
        for name, stepper in steppers.items():
            stop.check()
            synchronise()
            before = time.perf_counter()
            stepper.step(ids_ET, turns, 10**9)  # a rate near zero: what is timed does not depend on it
            synchronise()
            samples[name].append(time.perf_counter() - before)
        turns += 1
        if turns == WARM_UP_STEPS:
            began = time.perf_counter()
    timed = {name: own[WARM_UP_STEPS:] for name, own in samples.items()}
    print_event({"event": "timing", "seconds": timed, "peak_bytes": meter.peaks()["allocated"]})
    return EXIT_FINISHED


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status) if status == EXIT_INTERRUPTED else sys.exit(status)

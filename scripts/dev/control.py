"""`make control`: train B and the reciprocal patterns from swapped initial weights; their losses must coincide."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from gpt2 import dataset
from runtime import attention_kernels, resolved_target
from runtime.batch_plan import largest_micro_batch, plan_batch
from runtime.errors import run_command
from scripts.study import load

STEPS = 60
NAMES = ("RAALL", "RAEARLY", "RALATE")
TRAININGS = len(NAMES) + 2  # and B, and RAALL from unswapped weights
# Nats; float32: rounding. bfloat16: a GPU may add the float32 terms of attention's gradients in any order (atomics), so
# each bfloat16 element can move by one unit in the last place. tests/ra/test_control.py moves them all at random.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
SEQUENCES = 32  # at most; a control needs no large batch


def main() -> int:
    _, config, _ = load()
    resolved_target.export_environment(config.target.name)
    import torch

    from ra.control import Control, losses

    model = dataclasses.replace(config.model, dropout=0.0)
    resolved = attention_kernels.prepare_device(config.target, model)
    effective = min(config.batch.effective, SEQUENCES)
    block = config.model.block_size
    batch = plan_batch(effective, largest_micro_batch(effective, 1, 8), 1, block)
    corpus = dataset.open_corpus(dataset.prepare(config.data, report=print))
    number = itertools.count(1)

    def batches(k: int) -> torch.Tensor:
        return torch.from_numpy(dataset.global_batch(corpus.train, block, effective, 0, k).astype(np.int64))

    def train(name: str, swap: bool) -> list[float]:
        start = "swapped" if swap else "unswapped"
        print(f"training {next(number)} of {TRAININGS}: {name} from {start} weights", flush=True)
        return losses(
            name, model, config.optimizer, batch, batches, steps=STEPS, seed=0,
            device=resolved.device, dtype=resolved.dtype, swap=swap,
        )  # fmt: skip

    print(
        f"{STEPS} steps of {effective} sequences on {resolved.device_name}, {resolved.dtype}; no result is saved",
        flush=True,
    )
    with attention_kernels.attention_context(resolved):
        baseline = train("B", swap=False)
        controls = [Control(name, baseline, train(name, swap=True)) for name in NAMES]
        unswapped = Control("RAALL", baseline, train("RAALL", swap=False))
    print(f"{'step':>6}{'B':>12}" + "".join(f"{control.name:>12}" for control in controls))
    for k in range(0, STEPS, 10):
        print(
            f"{k + 1:>6}{baseline[k]:>12.6f}"
            + "".join(f"{control.swapped[k]:>12.6f}" for control in controls)
        )
    limit = TOLERANCE[resolved.dtype]
    failed = [control for control in controls if not control.largest_difference < limit]
    for control in controls:
        verdict = "coincides with B" if control not in failed else f"DIFFERS (limit {limit:g})"
        print(
            f"{control.name} from swapped weights: largest loss difference {control.largest_difference:.2e}: {verdict}"
        )
    print(
        f"RAALL from unswapped weights: largest loss difference {unswapped.largest_difference:.2e}: "
        "another random start of the same function class; noise, not an effect"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)

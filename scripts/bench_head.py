"""`make bench HEAD=1`: the head with its loss, forward and backward, made in every way that there is, in turn.

python -m scripts.bench_head [--rounds N] [--shape ROWS]   writes results/bench-head.json

Of GPT-2 124M. ours: gpt2.model.loss, compiled where training compiles it. full: all logits at once, on a GPU compiled
and with the padding that ours has. torch: its own linear_cross_entropy (from 2.13 on) without padding, with the chunks
that it chooses and with as many rows as ours.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import UserError, run_command
from scripts.bench import at_least, keep, tell
from study.runner.child_process import keep_heap

if TYPE_CHECKING:
    from torch import Tensor

    from gpt2.hardware.resolve import ResolvedTarget

OUT = Path("results/bench-head.json")
WIDTH, HEADS = 768, 12
ROWS = {"cpu": 512, "cuda": 32 * 1024}  # tokens of a micro-batch
OURS, FULL = "ours", "full"
ROUNDS = 15
Loss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]  # x_NC, weight_VC, targets_N -> a scalar


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench HEAD=1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--shape", default="", help="rows, which are tokens; default 512 on a CPU, 32768 on a GPU"
    )
    arguments = parser.parse_args()
    export_environment()
    # the profiler, which listens to the allocator, is to be silent
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    at_least(1, arguments.rounds)
    if arguments.shape and not (arguments.shape.isdecimal() and int(arguments.shape)):
        raise UserError(f"--shape {arguments.shape!r}; right: a number of rows, such as {ROWS['cpu']}")
    from gpt2.config.config import ANY_TARGET
    from scripts.bench_case import model_of
    from study.bench_shapes import Shape
    from study.bench_table import INTERVAL

    model = model_of(dataclasses.asdict(Shape("head", 1, HEADS, WIDTH, 64, ())))
    resolved = attention_kernels.prepare_device(ANY_TARGET, model)
    rows = int(arguments.shape or ROWS[resolved.device_type])
    tell(f"{resolved.device_name}, {resolved.dtype}; {rows} rows of {WIDTH}, GPT-2's vocabulary")
    found = measure(ways(resolved.device), rows, arguments.rounds, resolved)
    tell(text(found))
    tell(f"Speed: full's seconds over its own within a round, median [{INTERVAL}].")
    keep(OUT, resolved, {"rows": rows, "width": WIDTH, "ways": found})
    return 0


def ways(device: str) -> dict[str, Loss]:
    """By name. weight_VC has the padding that ours wants; the others get the rows of the vocabulary alone."""
    import torch

    from gpt2.config.config import VOCABULARY
    from gpt2.model.loss import CHUNK_ROWS, chunk_loss, chunk_loss_in_parts, linear_cross_entropy

    on_cpu = device == "cpu"
    chunk = chunk_loss_in_parts if on_cpu else torch.compile(chunk_loss)
    found: dict[str, Loss] = {
        OURS: lambda x, weight, targets: linear_cross_entropy(x, weight, targets, VOCABULARY, chunk),
        FULL: full if on_cpu else torch.compile(full_padded),
    }
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        size = CHUNK_ROWS["cpu" if on_cpu else "cuda"]
        options = {
            "torch": torch.nn.LinearCrossEntropyOptions(),
            f"torch, {size} rows": torch.nn.LinearCrossEntropyOptions(
                batch_chunk_size=size, chunking_method=None
            ),
        }
        for name, chosen in options.items():
            found[name] = functools.partial(torchs, options=chosen)
    else:
        tell("left out: torch: its linear_cross_entropy begins with torch 2.13")
    return found


def full(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    import torch.nn.functional as F

    from gpt2.config.config import VOCABULARY

    return F.cross_entropy(F.linear(x, weight[:VOCABULARY]), targets)


def full_padded(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As wide as the padding, which matrix units want; the padding is in no softmax."""
    import torch
    import torch.nn.functional as F

    from gpt2.config.config import VOCABULARY

    padding_V = torch.arange(weight.shape[0], device=x.device) >= VOCABULARY
    return F.cross_entropy(F.linear(x, weight).masked_fill(padding_V, float("-inf")), targets)


def torchs(x: Tensor, weight: Tensor, targets: Tensor, options: Any) -> Tensor:
    import torch.nn.functional as F

    from gpt2.config.config import VOCABULARY

    loss: Tensor = F.linear_cross_entropy(x, weight[:VOCABULARY], targets, options=options)
    return loss


def measure(
    found: dict[str, Loss], rows: int, rounds: int, resolved: ResolvedTarget
) -> dict[str, dict[str, Any]]:
    """Of each way: seconds (median), "speed" as study.bench_table.spread has it, peak bytes beyond what went in, and
    the loss, which is to be one. Another's way that fails is left out and told of; ours may not."""
    from study.bench_table import spread

    inputs = inputs_of(rows, resolved)
    once = functools.partial(one_pass, inputs=inputs, resolved=resolved)
    seen: dict[str, dict[str, Any]] = {}
    for name, way in found.items():
        try:
            once(way)  # settles caches and kernels
            peak = peak_of(functools.partial(once, way), resolved.device)
            seen[name] = {"loss": once(way), "peak_bytes": peak}
        except (RuntimeError, ValueError) as error:  # out of memory; what torch's own does not offer here
            if name == OURS:
                raise
            tell(f"left out: {name}: {(str(error) or type(error).__name__).splitlines()[0]}")
    times: dict[str, list[float]] = {name: [] for name in seen}
    for _ in range(rounds):
        for name in seen:
            before = time.perf_counter()
            once(found[name])
            times[name].append(time.perf_counter() - before)
    for name, row in seen.items():
        pairs = zip(times.get(FULL, []), times[name], strict=False)
        row |= {"seconds": median(times[name]), "speed": spread([full / own for full, own in pairs])}
    return seen


def inputs_of(rows: int, resolved: ResolvedTarget) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, WIDTH) and the padded head, which want gradients, in float32, and targets."""
    import torch

    from gpt2.config.config import PADDED_VOCABULARY, VOCABULARY

    draw = torch.Generator().manual_seed(0)
    x_NC = torch.randn(rows, WIDTH, generator=draw)
    weight_VC = torch.randn(PADDED_VOCABULARY, WIDTH, generator=draw) * 0.02
    targets_N = torch.randint(VOCABULARY, (rows,), generator=draw)
    x_NC, weight_VC = (tensor.to(resolved.device).requires_grad_() for tensor in (x_NC, weight_VC))
    return x_NC, weight_VC, targets_N.to(resolved.device)


def one_pass(way: Loss, inputs: tuple[Tensor, Tensor, Tensor], resolved: ResolvedTarget) -> float:
    """Forward and backward in the precision of training; the loss, for which a GPU is waited for."""
    from gpt2.train.step import autocast
    from gpt2.train.trainer import device_synchroniser

    x_NC, weight_VC, targets_N = inputs
    with autocast(resolved.device, resolved.dtype):
        loss = way(x_NC, weight_VC, targets_N)
    loss.backward()
    device_synchroniser(resolved.device)()
    x_NC.grad = weight_VC.grad = None
    return float(loss.detach())


def peak_of(work: Callable[[], Any], device: str) -> int:
    """Bytes that the allocator gave out at most while `work` ran, beyond those it had given out before."""
    import torch

    from gpt2.memory.measure import AllocatorListener
    from gpt2.train.peak_memory import PeakMeter

    meter: Any = AllocatorListener(0) if device == "cpu" else PeakMeter(device)
    before = 0 if device == "cpu" else torch.cuda.memory_allocated(device)
    listening: AbstractContextManager[Any] = meter if device == "cpu" else contextlib.nullcontext()
    with listening, meter.phase("head"):
        work()
    return int(meter.by_phase["head"]) - before


def text(found: dict[str, dict[str, Any]]) -> str:
    """The table."""
    from study.bench_table import columns, told

    head = ("way", "ms", "speed", "peak GiB", "loss")
    body = [
        (
            name,
            f"{1000 * row['seconds']:.1f}",
            told(row["speed"]),
            f"{row['peak_bytes'] / 2**30:.2f}",
            f"{row['loss']:.5f}",
        )
        for name, row in found.items()
    ]
    return columns([head, *body])


if __name__ == "__main__":
    keep_heap()
    run_command(main)

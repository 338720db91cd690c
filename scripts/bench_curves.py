"""`make bench CURVES=1`: do our steps and the plain ones train alike? Their loss curves, seed by seed.

python -m scripts.bench_curves [--rounds SEEDS] [--shape NAME]   writes results/bench-curves.json after every seed
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cases import Sizes, named
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import UserError, run_command
from scripts.bench import at_least, keep, tell

if TYPE_CHECKING:
    from torch import Tensor

    from gpt2.hardware.resolve import ResolvedTarget

OUT = Path("results/bench-curves.json")
SEEDS = 3
TOKENS = 2_000_000  # of text at most, from which the batches are drawn


@dataclass(frozen=True)
class Shape(Sizes):
    """The model, its micro-batch and optimizer step in sequences (micro, effective), and how it is trained."""

    micro: int
    effective: int
    steps: int
    learning_rate: float


TINY = Shape("tiny", 1, 2, 16, 16, 2, 4, 20, 1e-3)  # of the tests; by name only
SHAPES = {
    "cpu": (Shape("4x128-t128", 4, 4, 128, 128, 4, 8, 150, 1e-3), TINY),
    "cuda": (Shape("124m-t1024", 12, 12, 768, 1024, 12, 24, 300, 6e-4), TINY),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench CURVES=1")
    parser.add_argument("--rounds", type=int, default=SEEDS, help="seeds, each trained both ways")
    parser.add_argument("--shape", default="", help="the name of a shape; the first by default")
    arguments = parser.parse_args()
    export_environment()
    at_least(2, arguments.rounds, ", since the noise is that among seeds")
    from bench.case_step import model_of
    from bench.suites import loss_parity as loss_curves
    from gpt2.config.config import ANY_TARGET
    from gpt2.hardware import resolve

    kind = resolve.resolve(ANY_TARGET).device_type
    shape = named(SHAPES[kind], arguments.shape)
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_of(dataclasses.asdict(shape)))
    if kind != "cpu" and resolved.dtype != "bfloat16":
        raise UserError(f"the plain step is bfloat16 on a GPU and ours would be {resolved.dtype} on this one")
    tell(f"{resolved.device_name}, {resolved.dtype}; {shape.name}, {shape.steps} steps")
    batches = batches_of(shape, text_tokens())
    found: dict[str, Any] = {"shape": dataclasses.asdict(shape), "curves": []}
    pairs: list[loss_curves.Pair] = []
    for seed in range(arguments.rounds):
        pair = loss_curves.Pair(seed, *both(shape, seed, batches, resolved))
        pairs.append(pair)
        found["curves"].append(dataclasses.asdict(pair))
        ends = [loss_curves.end(losses) for losses in (pair.ours, pair.other)]
        tell(f"seed {seed}: ours {ends[0]:.6f}, plain {ends[1]:.6f} nats at the end")
        keep(OUT, resolved, found, complete=False)
    compared = loss_curves.compare(pairs)
    found |= {"rows": loss_curves.rows(pairs), "equal": compared.equal, **dataclasses.asdict(compared)}
    tell(loss_curves.text(found["rows"]))
    tell(loss_curves.verdict(compared, len(pairs)))
    keep(OUT, resolved, found)
    return 0


def text_tokens() -> Tensor:
    """Token ids of the text that is always there, (n,) int64, at most TOKENS."""
    import torch

    from gpt2.data import tokenizer
    from gpt2.data.sources import embedded_files

    encoding, ids = tokenizer.load(), list[int]()
    for path in embedded_files():
        ids += [tokenizer.EOT, *encoding.encode_ordinary(path.read_text(encoding="utf-8", errors="replace"))]
        if len(ids) >= TOKENS:
            break
    return torch.tensor(ids[:TOKENS])


def batches_of(shape: Shape, ids_N: Tensor) -> list[Tensor]:
    """The batches (E, T+1) of all steps on the CPU, windows drawn at random: the same for every seed and both ways."""
    import torch

    generator = torch.Generator().manual_seed(0)
    places = torch.arange(shape.block_size + 1)
    starts = torch.randint(
        len(ids_N) - shape.block_size, (shape.steps, shape.effective, 1), generator=generator
    )
    return list(ids_N[starts + places])


def both(
    shape: Shape, seed: int, batches: list[Tensor], resolved: ResolvedTarget
) -> tuple[list[float], list[float]]:
    """Losses of our steps and of the plain ones from the same weights on the same batches, one model at a time."""

    with attention_kernels.attention_context(resolved, 0.0):
        ours = losses_of(our_step(shape, seed, resolved), batches, resolved.device)
    return ours, losses_of(plain_step(shape, seed, resolved), batches, resolved.device)


def losses_of(step: Callable[[Tensor, int], float], batches: list[Tensor], device: str) -> list[float]:
    return [step(ids_ET.to(device), number) for number, ids_ET in enumerate(batches)]


def our_step(shape: Shape, seed: int, resolved: ResolvedTarget) -> Callable[[Tensor, int], float]:
    """A step as training makes it, compiled on a GPU."""
    from bench.case_step import stepper_of

    sizes = dataclasses.asdict(shape)
    stepper = stepper_of(sizes, "B", shape.micro, resolved, seed, shape.learning_rate)
    return lambda ids_ET, number: stepper.step(ids_ET, number, shape.steps).loss


def plain_step(shape: Shape, seed: int, resolved: ResolvedTarget) -> Callable[[Tensor, int], float]:
    """The plain step from our first weights. Its vocabulary is not padded: padding would be in its softmax."""
    from bench.case_step import model_of
    from bench.reference_gpt import PlainShape, PlainStep, take_weights
    from gpt2.config.config import VOCABULARY
    from gpt2.model.init import initialise
    from gpt2.train.step import build_model

    sizes = (shape.layers, shape.heads, shape.width, shape.block_size)
    step = PlainStep(
        PlainShape(*sizes, vocabulary=VOCABULARY),
        resolved.device,
        shape.effective // shape.micro,
        shape.learning_rate,
    )
    ours = build_model(model_of(dataclasses.asdict(shape)), None)
    initialise(ours, seed)
    take_weights(step.model, ours)
    return lambda ids_ET, number: float(step(ids_ET))


if __name__ == "__main__":
    run_command(main)

"""Compare the loss curves of our training step and the plain one, seed by seed: `make bench SUITE=loss_parity`.

For one seed both steps start from the same weights and get the same batches, so a difference is arithmetic. Seeds
start from different weights; their differences are the noise of an experiment.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.case_step import make_stepper, model_config
from bench.cases import BASELINE, Sizes, find_shapes
from bench.reference_gpt import PlainStep, take_weights
from bench.runner import BenchWorker
from bench.suite import Columns, Suite, SuiteSession, format_table
from gpt2 import tokenizer
from gpt2.initial_weights import initialise
from gpt2.text_sources import embedded_files
from gpt2.training_step import build_model
from referee.verdict.statistics import CONFIDENCE, Interval, mean, mean_interval, noise_floor
from runtime import attention_kernels
from runtime.errors import UserError
from runtime.settings import ANY_TARGET, GPT2
from study.executors.child_process import KEEP_HEAP

NARROW = "RESIDUAL_BF16"  # a case: our step with this symbol
END = 10  # the last tenth of the steps is the end of a curve
MAX_TOKENS = 2_000_000  # of text, from which the batches are drawn


@dataclass(frozen=True)
class TrainingShape(Sizes):
    """A model and its training. micro, effective: sequences of a micro-batch and of an optimizer step."""

    micro: int
    effective: int
    steps: int
    learning_rate: float


SHAPES = {
    "cpu": (
        TrainingShape("4x128-t128", 4, 4, 128, 128, 4, 8, 150, 1e-3),
        TrainingShape("2x64-t64", 2, 2, 64, 64, 4, 8, 150, 2e-3),  # bfloat16 is slow on a CPU
    ),
    "card": (TrainingShape("124m-t1024", 12, 12, 768, 1024, 12, 24, 300, 6e-4),),
}


@dataclass(frozen=True)
class LossParity:
    """Comparison of the losses at the end of training."""

    difference: Interval  # ours - plain, with its t interval over the seeds
    noise: float  # standard deviation of the final loss among seeds, pooled over both steps

    @property
    def equal(self) -> bool:
        """Whether the whole interval lies between -noise and noise. An interval that contains 0 is not enough."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and -self.noise <= low and high <= self.noise


def run(session: SuiteSession) -> tuple[Mapping[str, Any], list[str]]:
    """Train ROUNDS seeds with both steps, in a worker. Save after every seed."""
    shape = find_shapes(SHAPES[session.resolved.device_class], session.shape)[0]
    if not session.on_cpu and session.resolved.dtype != "bfloat16":
        raise UserError(
            f"the plain step needs bfloat16 on a GPU; this GPU trains in {session.resolved.dtype}; "
            "fix: use a GPU with bfloat16"
        )
    if session.cases not in ("", NARROW):
        raise UserError(f"unknown CASES={session.cases}; fix: CASES={NARROW}, or none")
    session.say(f"{shape.name}, {shape.steps} steps {session.cases}".rstrip())
    curves: list[dict[str, Any]] = []
    data: dict[str, Any] = {"shape": asdict(shape), "curves": curves}
    with BenchWorker(f"training of {shape.name}", KEEP_HEAP) as worker:
        for seed in range(session.rounds):
            ours, plain = worker.call(train_both, shape, seed, session.cases == NARROW)
            curves.append({"seed": seed, "ours": ours, "plain": plain})
            session.say(f"seed {seed + 1}/{session.rounds} is trained with both steps")
            session.save(data)
    rows = [row_of(**curve) for curve in curves]
    found = compare(rows)
    data |= {"rows": rows, "equal": found.equal, **asdict(found)}
    return data, [format_table("training loss in nats", COLUMNS, rows, (verdict(found),))]


def row_of(seed: int, ours: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """Return the final losses of one seed in nats, and the largest difference of a step."""
    largest = max(abs(one - other) for one, other in zip(ours, plain, strict=True))
    return {"seed": seed, "ours": final_loss(ours), "plain": final_loss(plain), "difference": largest}


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean loss of the last steps."""
    return mean(losses[-max(1, len(losses) // END) :])


def compare(rows: Sequence[Mapping[str, Any]]) -> LossParity:
    """Compare the final losses of two or more seeds."""
    noise = noise_floor([[row["ours"] for row in rows], [row["plain"] for row in rows]])
    assert noise, "one seed has no noise"
    return LossParity(mean_interval([row["ours"] - row["plain"] for row in rows]), noise.sigma)


COLUMNS: Columns = {
    "seed": lambda row: f"{row['seed']}",
    "ours at the end": lambda row: f"{row['ours']:.6f}",
    "plain at the end": lambda row: f"{row['plain']:.6f}",
    "largest difference of a step": lambda row: f"{row['difference']:.1e}",
}


def verdict(found: LossParity) -> str:
    """State in one line whether the two steps train alike."""
    interval = found.difference
    result = "equivalent within that noise" if found.equal else "NOT shown to be equivalent within that noise"
    return (
        f"ours - plain over the last tenth of the steps: {interval.mean:+.2g} nats [{interval.low:+.2g}, "
        f"{interval.high:+.2g}] ({CONFIDENCE:.0%} interval, {interval.count} seeds); noise of one seed: "
        f"{found.noise:.2g} nats: {result}"
    )


@functools.cache
def embedded_tokens() -> Tensor:
    """Return token ids of the embedded text, (n,) int64, at most MAX_TOKENS."""
    encoding, ids = tokenizer.load(GPT2.name), list[int]()
    for path in embedded_files():
        ids += [encoding.eot, *encoding.encode(path.read_text(encoding="utf-8", errors="replace"))]
        if len(ids) >= MAX_TOKENS:
            break
    return torch.tensor(ids[:MAX_TOKENS])


def draw_batches(shape: TrainingShape, ids_N: Tensor) -> list[Tensor]:
    """Draw the batches (E, T+1) of all steps at random, on the CPU: the same for every seed and both steps."""
    size = (shape.steps, shape.effective, 1)
    starts = torch.randint(len(ids_N) - shape.block_size, size, generator=torch.Generator().manual_seed(0))
    return list(ids_N[starts + torch.arange(shape.block_size + 1)])


def train_both(shape: TrainingShape, seed: int, narrow: bool = False) -> tuple[list[float], list[float]]:
    """Train with our step, then with the plain one, from the same weights on the same batches. Returns the losses.

    narrow: ours is in bfloat16 on a CPU, too, and as with CONFIG_RESIDUAL_BF16=y.
    """
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    if narrow:
        resolved = replace(resolved, dtype="bfloat16")
    micro, effective, rate, device = shape.micro, shape.effective, shape.learning_rate, resolved.device
    batches = draw_batches(shape, embedded_tokens())
    with attention_kernels.attention_context(resolved, 0.0):
        stepper = make_stepper(shape, BASELINE, micro, resolved, effective, seed, rate)
        stepper.model.bfloat16_residual = narrow
        ours = [stepper.step(ids_ET.to(device), k, shape.steps).loss for k, ids_ET in enumerate(batches)]
    # no padded vocabulary: padding would be in the plain step's softmax
    plain = PlainStep(shape, GPT2.size, device, effective // micro, rate)
    initial = build_model(model_config(shape), None)
    initialise(initial, seed)
    take_weights(plain.model, initial)
    return ours, [float(plain(ids_ET.to(device))) for ids_ET in batches]


SUITE = Suite(
    "loss_parity",
    "loss curves of our step and the plain one beside the noise among seeds",
    run,
    rounds=3,
    cases=True,
    least_rounds=2,
)

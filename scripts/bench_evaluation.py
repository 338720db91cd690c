"""`make bench EVALUATION=1`: seconds of the whole HellaSwag and of a validation, and their share of a run.

python -m scripts.bench_evaluation [--rounds N] [--seconds S] [--shape NAME]   writes results/bench-evaluation.json
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.cases import Sizes, named
from gpt2.hardware import attention_kernels
from gpt2.hardware.gpu_specs import TARGETS
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import run_command
from scripts.bench import at_least, keep, tell
from study.runner.child_process import keep_heap

if TYPE_CHECKING:
    import numpy as np

    from bench.evaluation_cost import Sample
    from gpt2.config.config import Config
    from gpt2.eval.hellaswag import Item
    from gpt2.hardware.resolve import ResolvedTarget
    from gpt2.train.peak_memory import PeakMeter

OUT = Path("results/bench-evaluation.json")
CASES = ("B", "RALEARN")
STUDY = "gpt2-ra-ablation+h200"  # whose validations and two hours are meant, on whatever machine this is
WARM_UP = {"cpu": 1, "cuda": 3}  # training steps before those that are timed


@dataclass(frozen=True)
class Shape(Sizes):
    """The model, and how much of an evaluation is timed: windows and items, 0 for all. micro: of a training step."""

    micro: int
    windows: int
    items: int


TINY = Shape("tiny", 1, 1, 8, 64, 1, 2, 3)  # of the tests; by name only
SHAPES = {
    "cpu": (Shape("124m-t256", 12, 12, 768, 256, 2, 16, 100), TINY),
    "cuda": (Shape("124m-t1024", 12, 12, 768, 1024, 32, 0, 0), TINY),
}


@dataclass(frozen=True)
class Material:
    """What is scored: windows (n, T+1) of token ids and items, which are all or a share; and what all would be."""

    windows: np.ndarray
    items: list[Item]
    item_tokens: int
    whole_items: int
    whole_item_tokens: int
    source: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench EVALUATION=1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed training steps a variant")
    parser.add_argument("--shape", default="", help="the name of a shape; the first by default")
    arguments = parser.parse_args()
    export_environment()
    at_least(1, arguments.rounds)
    from bench import evaluation_cost as cost
    from bench.case_step import model_of
    from gpt2.config.config import ANY_TARGET
    from gpt2.hardware import resolve

    kind = resolve.resolve(ANY_TARGET).device_type
    shape = named(SHAPES[kind], arguments.shape)
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_of(dataclasses.asdict(shape)))
    print(f"{resolved.device_name}, {resolved.dtype}; {shape.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = study_config(Path(folder))
    made = material(shape, config.evaluation.tokens, own_items_file(config))
    whole = cost.Whole(
        config.evaluation.tokens // shape.block_size * shape.block_size,
        config.evaluation.interval_tokens,
        float(config.budget.max_time_seconds),
        made.whole_items,
        made.whole_item_tokens,
    )
    print(f"HellaSwag: {made.source}", flush=True)
    found: dict[str, Any] = {
        "shape": dataclasses.asdict(shape),
        "items": made.source,
        "whole": dataclasses.asdict(whole),
    }

    def partly(samples: list[Sample]) -> None:
        found["samples"] = [dataclasses.asdict(sample) for sample in samples]
        keep(OUT, resolved, found, complete=False)

    samples, rates = in_turn(shape, resolved, made, arguments.rounds, arguments.seconds, partly)
    rows = cost.table(samples, rates, whole)
    print(cost.text(rows, whole))
    goal_card = TARGETS[cost.GOAL_CARD].peak_flops
    if resolved.target.peak_flops and goal_card:
        print(cost.verdict(rows, resolved.target.peak_flops, goal_card))
    keep(OUT, resolved, found | {"rows": rows})
    return 0


def in_turn(
    shape: Shape,
    resolved: ResolvedTarget,
    made: Material,
    rounds: int,
    seconds: float,
    partly: Callable[[list[Sample]], None],
) -> tuple[list[Sample], dict[str, float]]:
    """Every case's evaluation once a round, then its training tokens/s. partly: called with all samples so far."""
    from gpt2.train.peak_memory import PeakMeter

    samples: list[Sample] = []
    rates: dict[str, float] = {}
    with attention_kernels.attention_context(resolved, 0.0):
        meter = PeakMeter(resolved.device)
        for number in range(rounds):
            for case in CASES:
                sample = one_turn(shape, case, resolved, made, meter)
                leave_no_memory(resolved.device)
                samples.append(sample)
                partly(samples)
                tell(
                    f"round {number + 1}, {case}: validation of {sample.validation_tokens:,} tokens "
                    f"{sample.validation_seconds:.2f} s, {sample.items} items {sample.hellaswag_seconds:.2f} s"
                )
        for case in CASES:  # last: what its memory leaves behind is in nobody's peak
            rates[case] = training_rate(shape, case, resolved, seconds)
            leave_no_memory(resolved.device)
            tell(f"training, {case}: {rates[case]:,.0f} tokens/s")
    return samples, rates


def study_config(folder: Path) -> Config:
    """The main study's configuration on the goal's card: how much it validates, how often, in how long a run."""
    from bench.temporary_studies import study_in

    return study_in(folder, STUDY).config


def own_items_file(default: Config) -> Path | None:
    """The items that .config names or that were downloaded before, if there are any; nothing is downloaded."""
    from gpt2.config.config import load_config
    from gpt2.eval.hellaswag import FILE_NAME

    config = load_config(".config") if Path(".config").is_file() else default
    path = config.evaluation.hellaswag_file or config.data.directory / FILE_NAME
    return path if path.is_file() else None


def material(shape: Shape, validation_tokens: int, file: Path | None, seed: int = 0) -> Material:
    """Random token ids as validation windows; the items of the file, or items as long as the real ones."""
    import numpy as np

    from bench import evaluation_cost as cost
    from gpt2.config.config import VOCABULARY
    from gpt2.data import tokenizer
    from gpt2.eval import hellaswag

    encoding = tokenizer.load()
    items = hellaswag.load_items(file, 0) if file else cost.synthetic_items(encoding, seed)
    source = f"the items of {file}" if file else "made-up items, as long in tokens as the real ones"
    count = shape.windows or validation_tokens // shape.block_size
    draw = np.random.default_rng(seed)
    windows = draw.integers(VOCABULARY, size=(count, shape.block_size + 1)).astype(np.uint16)
    share = items
    if 0 < shape.items < len(items):
        share = random.Random(seed).sample(items, shape.items)
        source += f"; timed: {shape.items} of them, drawn at random"
    return Material(
        windows,
        share,
        cost.scored_tokens(share, encoding, shape.block_size),
        len(items),
        cost.scored_tokens(items, encoding, shape.block_size),
        source,
    )


def training_rate(shape: Shape, case: str, resolved: ResolvedTarget, seconds: float) -> float:
    """Tokens/s of training steps, compiled on a GPU: a run's speed is how many validations it comes to."""
    import torch

    from bench.case_step import stepper_of
    from gpt2.config.config import VOCABULARY
    from gpt2.train.trainer import device_synchroniser

    synchronise = device_synchroniser(resolved.device)
    stepper = stepper_of(dataclasses.asdict(shape), case, shape.micro, resolved)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(VOCABULARY, (shape.micro, shape.block_size + 1), generator=generator)
    ids_BT = ids_BT.to(resolved.device)
    taken: list[float] = []
    warm_up = WARM_UP[resolved.device_type]
    while len(taken) < warm_up + 3 or sum(taken[warm_up:]) < seconds:
        synchronise()
        before = time.perf_counter()
        stepper.step(ids_BT, len(taken), 10**9)
        synchronise()
        taken.append(time.perf_counter() - before)
    return shape.micro * shape.block_size / median(taken[warm_up:])


def one_turn(shape: Shape, case: str, resolved: ResolvedTarget, made: Material, meter: PeakMeter) -> Sample:
    """One evaluation of a variant by the functions that a run calls, after one batch to warm up.

    meter: made before any model. On a CPU its peaks are growth of the process, buffers that the heap keeps included.
    """
    import torch

    from bench import evaluation_cost as cost
    from bench.case_step import model_and_attention
    from gpt2.data import tokenizer
    from gpt2.eval import hellaswag
    from gpt2.eval import validation as evaluate
    from gpt2.model.init import initialise
    from gpt2.train.step import autocast, build_model
    from gpt2.train.trainer import device_synchroniser

    device = resolved.device
    timed = partial(seconds_of, device_synchroniser(device))
    precision: Callable[[], AbstractContextManager[Any]] = partial(autocast, device, resolved.dtype)
    at_once = evaluate.EVALUATION_TOKENS[torch.device(device).type]
    batch = max(1, at_once // shape.block_size)
    model = build_model(*model_and_attention(dataclasses.asdict(shape), case))
    initialise(model, 0)
    model.to(device)
    evaluate.perplexity(model, made.windows[:batch], batch, device, precision)
    with meter.phase(f"{case}: validation"):
        validation = timed(lambda: evaluate.perplexity(model, made.windows, batch, device, precision))
    with meter.phase(f"{case}: hellaswag"):
        scoring = timed(
            lambda: hellaswag.score(
                model,
                made.items,
                tokenizer.load(),
                batch_tokens=at_once,
                block_size=shape.block_size,
                device=device,
                autocast=precision,
            )
        )
    own = [value for name, value in meter.by_phase.items() if name.startswith(f"{case}: ")]
    peak = max(own, default=meter.peaks()["allocated"])
    tokens = made.windows.shape[0] * shape.block_size
    return cost.Sample(case, tokens, validation, len(made.items), made.item_tokens, scoring, peak)


def seconds_of(synchronise: Callable[[], None], work: Callable[[], Any]) -> float:
    synchronise()
    before = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - before


def leave_no_memory(device: str) -> None:
    """What one turn has left behind is not the next one's."""
    import torch

    gc.collect()
    if device != "cpu":
        torch.compiler.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    keep_heap()
    run_command(main)

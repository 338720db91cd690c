"""Measure HellaSwag, validation, and their share of a run: `make bench SUITE=evaluation`."""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import cases, workers
from bench import evaluation_cost as cost
from bench.case_step import model_and_attention, model_config
from bench.suite import Options, Session, Suite, SuiteResult
from bench.temporary_studies import configure_study
from gpt2.config.config import ANY_TARGET, VOCABULARY, Config, load_config
from gpt2.data import tokenizer
from gpt2.eval import hellaswag, validation
from gpt2.eval.hellaswag_download import FILE_NAME
from gpt2.hardware import attention_kernels
from gpt2.hardware.gpu_specs import TARGETS
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.model.init import initialise
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import autocast, build_model
from gpt2.train.trainer import device_synchroniser

CASES = ("B", "RALEARN")
STUDY = "gpt2-ra-ablation+h200"  # its validations and two hours are extrapolated to, on any machine


@dataclass(frozen=True)
class Shape(cases.Sizes):
    """A model, and the share of an evaluation to time. windows, items: 0 for all. micro: of a training step."""

    micro: int
    windows: int
    items: int


TINY = Shape("tiny", 1, 1, 8, 64, 1, 2, 3)  # for tests, by name only
SHAPES = {
    "cpu": (Shape("124m-t256", 12, 12, 768, 256, 2, 16, 100), TINY),
    "cuda": (Shape("124m-t1024", 12, 12, 768, 1024, 32, 0, 0), TINY),
}


@dataclass(frozen=True)
class Material:
    """Windows (n, T+1) of token ids and items to score, and the size of the whole that they are a share of."""

    windows: np.ndarray
    items: list[hellaswag.Item]
    item_tokens: int
    whole_items: int
    whole_item_tokens: int
    source: str


def run(options: Options, session: Session) -> SuiteResult:
    """Evaluate each variant once a round, then time its training steps. Save after every evaluation."""
    shape = cases.find_shape(SHAPES[session.resolved.device_type], options.shape)
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    with tempfile.TemporaryDirectory() as folder:
        config = configure_study(Path(folder), STUDY).config
    material = make_material(shape, config.evaluation.tokens, local_items_file(config))
    whole = cost.Whole(
        config.evaluation.tokens // shape.block_size * shape.block_size,
        config.evaluation.interval_tokens,
        float(config.budget.max_time_seconds),
        material.whole_items,
        material.whole_item_tokens,
    )
    session.say(f"{shape.name}; HellaSwag: {material.source}")
    samples: list[cost.Sample] = []
    data: dict[str, Any] = {"shape": asdict(shape), "items": material.source, "whole": asdict(whole)}
    with attention_kernels.attention_context(resolved, 0.0):
        meter = PeakMeter(resolved.device)
        for number in range(options.rounds):
            for case in CASES:
                sample = evaluate_once(shape, case, resolved, material, meter)
                release_memory(resolved.device)
                samples.append(sample)
                session.save(data | {"samples": [asdict(sample) for sample in samples]})
                session.say(
                    f"round {number + 1}/{options.rounds}  {case}: validation of {sample.validation_tokens:,} tokens "
                    f"{sample.validation_seconds:.2f} s, {sample.items} items {sample.hellaswag_seconds:.2f} s"
                )
    rates = {case: training_rate(shape, case, options.seconds) for case in CASES}
    rows = cost.rows_of(samples, rates, whole)
    peak, goal_peak = resolved.target.peak_flops, TARGETS[cost.GOAL_CARD].peak_flops
    notes = (cost.goals(rows, peak, goal_peak),) if peak and goal_peak else ()
    data |= {"samples": [asdict(sample) for sample in samples], "rows": rows}
    return SuiteResult(data, (cost.table(rows, whole),), notes)


def local_items_file(default: Config) -> Path | None:
    """Return the HellaSwag file that .config names or that was downloaded earlier. Download nothing."""
    config = load_config(".config") if Path(".config").is_file() else default
    path = config.evaluation.hellaswag_file or config.data.directory / FILE_NAME
    return path if path.is_file() else None


def make_material(shape: Shape, validation_tokens: int, file: Path | None, seed: int = 0) -> Material:
    """Make validation windows of random token ids. Take the items of the file, or synthetic ones without a file."""
    encoding = tokenizer.load()
    items = hellaswag.load_items(file, 0) if file else cost.synthetic_items(encoding, seed)
    source = f"the items of {file}" if file else "synthetic items with the token lengths of the real ones"
    size = (shape.windows or validation_tokens // shape.block_size, shape.block_size + 1)
    windows = np.random.default_rng(seed).integers(VOCABULARY, size=size).astype(np.uint16)
    share = items
    if 0 < shape.items < len(items):
        share = random.Random(seed).sample(items, shape.items)
        source += f"; timed: {shape.items} of them, drawn at random"
    tokens, whole_tokens = (cost.scored_tokens(some, encoding, shape.block_size) for some in (share, items))
    return Material(windows, share, tokens, len(items), whole_tokens, source)


def training_rate(shape: Shape, case: str, seconds: float) -> float:
    """Measure tokens/s of training steps. The rate gives the number of validations of a run."""
    model = cases.Shape(shape.name, shape.layers, shape.heads, shape.width, shape.block_size)
    rate: float = workers.measure_in_new_worker(model, case, shape.micro, seconds)["tokens_per_second"]
    return rate


def evaluate_once(
    shape: Shape, case: str, resolved: ResolvedTarget, material: Material, meter: PeakMeter
) -> cost.Sample:
    """Evaluate a variant once with the functions of a run, after one warm-up batch.

    meter: created before any model. On a CPU its peaks are growth of the process, with buffers that the heap keeps.
    """
    device = resolved.device
    timed = partial(seconds_of, device_synchroniser(device))
    precision: Callable[[], AbstractContextManager[Any]] = partial(autocast, device, resolved.dtype)
    at_once = validation.EVALUATION_TOKENS[resolved.device_type]
    batch = max(1, at_once // shape.block_size)
    model = build_model(*model_and_attention(shape, case))
    initialise(model, 0)
    model.to(device)
    score = partial(
        hellaswag.score,
        model,
        material.items,
        tokenizer.load(),
        batch_tokens=at_once,
        block_size=shape.block_size,
        device=device,
        autocast=precision,
    )
    validation.perplexity(model, material.windows[:batch], batch, device, precision)
    with meter.phase(f"{case}: validation"):
        validation_seconds = timed(
            lambda: validation.perplexity(model, material.windows, batch, device, precision)
        )
    with meter.phase(f"{case}: hellaswag"):
        hellaswag_seconds = timed(score)
    peaks = [value for name, value in meter.by_phase.items() if name.startswith(f"{case}: ")]
    peak = max(peaks, default=meter.peaks()["allocated"])
    tokens = material.windows.shape[0] * shape.block_size
    return cost.Sample(
        case, tokens, validation_seconds, len(material.items), material.item_tokens, hellaswag_seconds, peak
    )


def seconds_of(synchronise: Callable[[], None], work: Callable[[], Any]) -> float:
    synchronise()
    before = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - before


def release_memory(device: str) -> None:
    """Free the memory of one measurement before the next one."""
    gc.collect()
    if device != "cpu":
        torch.compiler.reset()
        torch.cuda.empty_cache()


SUITE = Suite(
    "evaluation",
    "seconds of HellaSwag and of a validation, and their share of a run",
    run,
    options={
        "SHAPE": "the name of a shape; the first by default",
        "ROUNDS": "evaluations of each variant",
        "SECONDS": "timed training steps of each variant",
    },
    rounds={"cpu": 3, "cuda": 3},
    seconds={"cpu": 6.0, "cuda": 6.0},
    own_heap=True,
)

"""Measure HellaSwag, validation, and their share of a run: `make bench SUITE=evaluation`.

A share of each is timed and extrapolated by its tokens to the whole evaluation of the study STUDY. The items are
synthetic, with the token lengths of the published ones.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.case_step import model_and_parts, model_config
from bench.cases import Shape, find_shapes
from bench.runner import case_worker, open_workers
from bench.suite import (
    INTERVAL,
    Columns,
    ResultTable,
    Suite,
    SuiteResult,
    SuiteSession,
    format_spread,
    mebibytes,
    spread,
)
from bench.temporary_studies import configure_study
from gpt2 import hellaswag, tokenizer, validation
from gpt2.clocks import device_synchroniser
from gpt2.initial_weights import initialise
from gpt2.measured_memory import PeakMeter
from gpt2.training_step import autocast, build_model
from runtime import attention_kernels
from runtime.settings import ANY_TARGET, GPT2

CASES = ("B", "RALEARN")
STUDY = "gpt2-ra-ablation+h200"
GOAL = "goal on an H200: HellaSwag within 60 s, validation within 3 % of training"
# Items of each source in HellaSwag's validation set, and ranges of the tokens of a query and of an ending. Lengths
# drawn evenly from these ranges have the means of the real ones and about their spread.
VIDEO_CAPTIONS, WIKIHOW = (3243, (14, 44), (4, 24)), (6799, (41, 78), (21, 53))


@dataclass(frozen=True)
class EvaluatedShape(Shape):
    """A model, and the share of an evaluation to time. windows, items: 0 for all. micro: of a training step."""

    micro: int = 1
    windows: int = 0
    items: int = 0


SHAPES = {
    "cpu": (EvaluatedShape("124m-t256", 12, 12, 768, 256, micro=2, windows=16, items=100),),
    "card": (EvaluatedShape("124m-t1024", 12, 12, 768, 1024, micro=32),),
}


@dataclass(frozen=True)
class Whole:
    """The full evaluation of a run. interval_tokens: training tokens from one validation to the next.

    items, item_tokens: of the whole HellaSwag.
    """

    validation_tokens: int
    interval_tokens: int
    items: int
    item_tokens: int


@dataclass(frozen=True)
class EvaluationTiming:
    """One variant in one round: the scored share, its time, and the peak bytes with the weights."""

    case: str
    validation_tokens: int
    validation_seconds: float
    items: int
    item_tokens: int
    hellaswag_seconds: float
    peak_bytes: int


def run(session: SuiteSession) -> SuiteResult:
    """Evaluate each variant once a round in a new worker, then time its training steps. Save after every evaluation."""
    shape = find_shapes(SHAPES[session.resolved.device_class], session.shape)[0]
    with tempfile.TemporaryDirectory() as folder:
        config = configure_study(Path(folder), STUDY).config
    items = synthetic_items()
    share = random.Random(0).sample(items, shape.items or len(items))
    tokens = config.evaluation.tokens // shape.block_size * shape.block_size
    item_tokens = scored_tokens(items, shape.block_size)
    whole = Whole(tokens, config.evaluation.interval_tokens, len(items), item_tokens)
    samples: list[EvaluationTiming] = []
    data: dict[str, Any] = {"shape": asdict(shape), "whole": asdict(whole)}
    windows = shape.windows or whole.validation_tokens // shape.block_size
    for number in range(session.rounds):
        for case in CASES:
            with case_worker(shape, case, shape.micro) as worker:
                sample = worker.call(evaluate_once, shape, case, windows, share)
            samples.append(sample)
            data["samples"] = [asdict(sample) for sample in samples]
            session.save(data)
            session.say(
                f"round {number + 1}/{session.rounds}  {case}: validation of {sample.validation_tokens:,} tokens "
                f"{sample.validation_seconds:.2f} s, {sample.items} items {sample.hellaswag_seconds:.2f} s"
            )
    with open_workers(persistent=False) as measure:
        turns = {case: measure(shape, case, shape.micro, session.seconds) for case in CASES}
    rates = {case: turn["tokens_per_second"] for case, turn in turns.items()}
    data["rows"] = rows_of(samples, rates, whole)
    return SuiteResult(data, (table(data["rows"], samples, whole),))


def synthetic_items(seed: int = 0) -> list[hellaswag.Item]:
    """Generate as many items as HellaSwag has, of one repeated word, which is one token; reproducible by seed."""
    draw, items = random.Random(seed), []
    for count, query_tokens, ending_tokens in (VIDEO_CAPTIONS, WIKIHOW):
        for _ in range(count):
            query, *endings = (
                " ".join(["the"] * draw.randint(*length))
                for length in (query_tokens, *[ending_tokens] * hellaswag.ENDINGS)
            )
            items.append(hellaswag.Item(query, tuple(endings), draw.randrange(hellaswag.ENDINGS)))
    return items


def scored_tokens(items: Sequence[hellaswag.Item], block_size: int) -> int:
    """Count the positions that the model computes, without padding, to score all endings of the items."""
    encoding = tokenizer.load(GPT2.name)
    return sum(
        min(len(hellaswag.encode_pair(encoding, item.query, ending)[0]) - 1, block_size)
        for item in items
        for ending in item.endings
    )


def evaluate_once(
    shape: EvaluatedShape, case: str, windows: int, items: list[hellaswag.Item]
) -> EvaluationTiming:
    """Evaluate a variant with the functions of a run, after one warm-up batch. Call in a worker.

    windows: number of validation windows, of random token ids. On a CPU the peak is growth of the process, with the
    buffers that its heap keeps.
    """
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    device, meter = resolved.device, PeakMeter(resolved.device)
    synchronise = device_synchroniser(device)
    precision: Callable[[], AbstractContextManager[Any]] = partial(autocast, device, resolved.dtype)
    at_once = validation.EVALUATION_TOKENS[resolved.device_class]
    batch = max(1, at_once // shape.block_size)
    size = (windows, shape.block_size + 1)
    ids = np.random.default_rng(0).integers(GPT2.size, size=size).astype(np.uint16)
    model = build_model(*model_and_parts(shape, case))
    initialise(model, 0)
    model.to(device)
    score = partial(hellaswag.score, batch_tokens=at_once, block_size=shape.block_size, device=device)

    def seconds_of(work: Callable[[], Any]) -> float:
        synchronise()
        before = time.perf_counter()
        with meter.phase("evaluation"):
            work()
            synchronise()
        return time.perf_counter() - before

    with attention_kernels.attention_context(resolved, 0.0):
        validation.perplexity(model, ids[:batch], batch, device, precision)
        validation_seconds = seconds_of(lambda: validation.perplexity(model, ids, batch, device, precision))
        hellaswag_seconds = seconds_of(
            lambda: score(model, items, tokenizer.load(GPT2.name), autocast=precision)
        )
    peak = meter.by_phase.get("evaluation", meter.peaks()["allocated"])
    tokens, item_tokens = windows * shape.block_size, scored_tokens(items, shape.block_size)
    return EvaluationTiming(
        case, tokens, validation_seconds, len(items), item_tokens, hellaswag_seconds, peak
    )


def rows_of(
    samples: Sequence[EvaluationTiming], training_rates: Mapping[str, float], whole: Whole
) -> list[dict[str, Any]]:
    """Return one row a variant, each value extrapolated from a share by its tokens, as `spread` over the rounds."""
    rows = []
    for case, rate in training_rates.items():
        measured = [sample for sample in samples if sample.case == case]
        seconds = [s.validation_seconds * whole.validation_tokens / s.validation_tokens for s in measured]
        rows.append(
            {
                "case": case,
                "hellaswag_seconds": spread(
                    [s.hellaswag_seconds * whole.item_tokens / s.item_tokens for s in measured]
                ),
                "validation_seconds": spread(seconds),
                "training_tokens_per_second": rate,
                "validation_share": spread([value * rate / whole.interval_tokens for value in seconds]),
                "peak_bytes": max(sample.peak_bytes for sample in measured),
            }
        )
    return rows


COLUMNS: Columns = {
    "variant": lambda row: row["case"],
    "HellaSwag s": lambda row: format_spread(row["hellaswag_seconds"], ".1f"),
    "one validation s": lambda row: format_spread(row["validation_seconds"], ".2f"),
    "% of training": lambda row: format_spread(row["validation_share"], ".2f", 100),
    "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
}


def table(rows: list[dict[str, Any]], samples: Sequence[EvaluationTiming], whole: Whole) -> ResultTable:
    """List the rows. Notes state the extrapolations and the source of the number of validations."""
    timed, notes = samples[0], [f"{len(samples) // len(rows)} rounds, median [{INTERVAL}]"]
    if timed.items < whole.items:
        notes.append(f"HellaSwag s is EXTRAPOLATED by tokens from {timed.items} items to all {whole.items:,}")
    if timed.validation_tokens < whole.validation_tokens:
        source = f"from {timed.validation_tokens:,} tokens to all {whole.validation_tokens:,}"
        notes.append(f"one validation s is EXTRAPOLATED {source}")
    rates = ", ".join(f"{row['case']} {row['training_tokens_per_second']:,.0f}" for row in rows)
    interval = f"one validation each {whole.interval_tokens:,} training tokens"
    notes.append(f"% of training: {interval}, at the training speed measured here ({rates} tokens/s)")
    return ResultTable.of("cost of evaluation", COLUMNS, rows, [*notes, GOAL])


SUITE = Suite(
    "evaluation",
    "seconds of HellaSwag and of a validation, and its share of training",
    run,
    shape="the first shape whose name contains this",
    rounds={"cpu": 3, "card": 3},
    seconds={"cpu": 6.0, "card": 6.0},
)

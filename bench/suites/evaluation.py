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

from bench.card_studies import configure_study
from bench.case_step import model_and_parts, model_config
from bench.cases import BASELINE, LEARNED, Shape, find_shapes
from bench.runner import case_worker, measure_case
from bench.suite import INTERVAL, Columns, Suite, SuiteSession, format_spread, format_table, spread
from gpt2 import hellaswag, tokenizer, validation
from gpt2.clocks import device_synchroniser
from gpt2.initial_weights import initialise
from gpt2.training_step import autocast, build_model
from runtime import attention_kernels
from runtime.settings import ANY_TARGET, GPT2

CASES = (BASELINE, LEARNED)
STUDY = "gpt2-ra-ablation+h200"
GOAL = "goal on an H200: HellaSwag within 60 s, validation within 3 % of training"
# Items of each source in HellaSwag's validation set, and ranges of the tokens of a query and of an ending. Lengths
# drawn evenly from these ranges have the means of the real ones and about their spread.
VIDEO_CAPTIONS, WIKIHOW = (3243, (14, 44), (4, 24)), (6799, (41, 78), (21, 53))


@dataclass(frozen=True)
class EvaluatedShape(Shape):
    """A model, and the share of an evaluation to time."""

    micro: int = 1  # of a training step
    windows: int = 0  # 0: all
    items: int = 0  # 0: all


SHAPES = {
    "cpu": (EvaluatedShape("124m-t256", 12, 12, 768, 256, micro=2, windows=16, items=100),),
    "card": (EvaluatedShape("124m-t1024", 12, 12, 768, 1024, micro=32),),
}


def run(session: SuiteSession) -> tuple[Mapping[str, Any], list[str]]:
    """Evaluate each variant once a round in a new worker, then time its training steps. Save after every evaluation."""
    shape = find_shapes(SHAPES[session.resolved.device_class], session.shape)[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = configure_study(Path(folder), STUDY).config.evaluation
    every = synthetic_items()
    items = random.Random(0).sample(every, shape.items or len(every))
    tokens = settings.tokens // shape.block_size * shape.block_size
    windows = shape.windows or tokens // shape.block_size
    more_tokens = tokens / (windows * shape.block_size)
    more_items = scored_tokens(every, shape.block_size) / scored_tokens(items, shape.block_size)
    samples: list[dict[str, Any]] = []
    data: dict[str, Any] = {
        "shape": asdict(shape),
        "items": len(items),
        "windows": windows,
        "samples": samples,
    }
    for number in range(session.rounds):
        for case in CASES:
            with case_worker(shape, case, shape.micro) as worker:
                timed = worker.call(evaluate_once, shape, case, windows, items)
            samples.append({"case": case, **timed})
            session.save(data)
            texts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timed.items())
            session.say(f"round {number + 1}/{session.rounds}  {case}: {texts}")
    rows = []
    for case in CASES:
        rate = measure_case(shape, case, shape.micro, session.seconds)["tokens_per_second"]
        measured = [sample for sample in samples if sample["case"] == case]
        seconds = [sample["validation"] * more_tokens for sample in measured]
        rows.append(
            {
                "case": case,
                "hellaswag_seconds": spread([sample["hellaswag"] * more_items for sample in measured]),
                "validation_seconds": spread(seconds),
                "training_tokens_per_second": rate,
                "validation_share": spread([each * rate / settings.interval_tokens for each in seconds]),
            }
        )
    notes = [
        f"{session.rounds} rounds, median [{INTERVAL}]",
        f"HellaSwag s: EXTRAPOLATED by tokens from {len(items):,} items to all {len(every):,}, {more_items:.4g} times",
        f"one validation s: EXTRAPOLATED from {windows:,} windows to {tokens:,} tokens, {more_tokens:.4g} times",
        f"% of training: one validation each {settings.interval_tokens:,} training tokens, at the speed measured here",
        GOAL,
    ]
    return data | {"rows": rows}, [format_table("cost of evaluation", COLUMNS, rows, notes)]


COLUMNS: Columns = {
    "variant": lambda row: row["case"],
    "HellaSwag s": lambda row: format_spread(row["hellaswag_seconds"], ".1f"),
    "one validation s": lambda row: format_spread(row["validation_seconds"], ".2f"),
    "% of training": lambda row: format_spread(row["validation_share"], ".2f", 100),
    "training tokens/s": lambda row: f"{row['training_tokens_per_second']:,.0f}",
}


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
) -> dict[str, float]:
    """Return the seconds of a validation and of HellaSwag with the functions of a run, after one warm-up batch.

    windows: number of validation windows, of random token ids. Call in a worker.
    """
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    device = resolved.device
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
    encoding = tokenizer.load(GPT2.name)

    def seconds_of(work: Callable[[], Any]) -> float:
        synchronise()
        before = time.perf_counter()
        work()
        synchronise()
        return time.perf_counter() - before

    with attention_kernels.attention_context(resolved, 0.0):
        validation.perplexity(model, ids[:batch], batch, device, precision)
        return {
            "validation": seconds_of(lambda: validation.perplexity(model, ids, batch, device, precision)),
            "hellaswag": seconds_of(lambda: score(model, items, encoding, autocast=precision)),
        }


SUITE = Suite(
    "evaluation",
    "seconds of HellaSwag and of a validation, and its share of training",
    run,
    rounds=3,
    seconds=6.0,
)

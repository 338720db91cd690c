"""Measure HellaSwag, validation, and their share of a run: `make bench SUITE=evaluation`.

A share of each is timed and extrapolated by its tokens to the whole evaluation of the study STUDY.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from bench import cases
from bench.case_step import model_and_attention, model_config
from bench.runner import case_worker, open_workers
from bench.suite import Options, Session, Suite, SuiteResult
from bench.tables import INTERVAL, Columns, ResultTable, format_spread, mebibytes, spread
from bench.temporary_studies import configure_study
from gpt2.config.config import ANY_TARGET, VOCABULARY, Config, load_config
from gpt2.data import tokenizer
from gpt2.eval import hellaswag, validation
from gpt2.eval.hellaswag_download import FILE_NAME
from gpt2.hardware import attention_kernels
from gpt2.model.init import initialise
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import autocast, build_model
from gpt2.train.trainer import device_synchroniser

CASES = ("B", "RALEARN")
STUDY = "gpt2-ra-ablation+h200"
GOAL = "goal on an H200: HellaSwag within 60 s, validation within 3 % of a run"
# Items of each source in HellaSwag's validation set, and ranges of the tokens of a query and of an ending. Lengths
# drawn evenly from these ranges have the means of the real ones and about their spread.
VIDEO_CAPTIONS, WIKIHOW = (3243, (14, 44), (4, 24)), (6799, (41, 78), (21, 53))


@dataclass(frozen=True)
class Shape(cases.Sizes):
    """A model, and the share of an evaluation to time. windows, items: 0 for all. micro: of a training step."""

    micro: int
    windows: int
    items: int


TINY = Shape("tiny", 1, 1, 8, 64, 1, 2, 3)  # for tests
SHAPES = {
    "cpu": (Shape("124m-t256", 12, 12, 768, 256, 2, 16, 100), TINY),
    "cuda": (Shape("124m-t1024", 12, 12, 768, 1024, 32, 0, 0), TINY),
}


@dataclass(frozen=True)
class Whole:
    """The full evaluation of a run. interval_tokens: training tokens from one validation to the next.

    run_seconds: of training. items, item_tokens: of the whole HellaSwag.
    """

    validation_tokens: int
    interval_tokens: int
    run_seconds: float
    items: int
    item_tokens: int


@dataclass(frozen=True)
class Sample:
    """One variant in one round: the scored share, its time, and the peak bytes with the weights."""

    case: str
    validation_tokens: int
    validation_seconds: float
    items: int
    item_tokens: int
    hellaswag_seconds: float
    peak_bytes: int


def run(options: Options, session: Session) -> SuiteResult:
    """Evaluate each variant once a round in a new worker, then time its training steps. Save after every evaluation."""
    shape = cases.find_shapes(SHAPES[session.resolved.device_type], options.shape)[0]
    with tempfile.TemporaryDirectory() as folder:
        config = configure_study(Path(folder), STUDY).config
    items, share, source = choose_items(shape, local_items_file(config))
    tokens = config.evaluation.tokens // shape.block_size * shape.block_size
    run_seconds = float(config.budget.max_time_seconds)
    item_tokens = scored_tokens(items, shape.block_size)
    whole = Whole(tokens, config.evaluation.interval_tokens, run_seconds, len(items), item_tokens)
    session.say(f"{shape.name}; HellaSwag: {source}")
    samples: list[Sample] = []
    data: dict[str, Any] = {"shape": asdict(shape), "items": source, "whole": asdict(whole)}
    windows = shape.windows or whole.validation_tokens // shape.block_size
    for number in range(options.rounds):
        for case in CASES:
            with case_worker(shape, case, shape.micro) as worker:
                sample = worker.call(evaluate_once, shape, case, windows, share)
            samples.append(sample)
            data["samples"] = [asdict(sample) for sample in samples]
            session.save(data)
            session.say(
                f"round {number + 1}/{options.rounds}  {case}: validation of {sample.validation_tokens:,} tokens "
                f"{sample.validation_seconds:.2f} s, {sample.items} items {sample.hellaswag_seconds:.2f} s"
            )
    model = cases.Shape(shape.name, shape.layers, shape.heads, shape.width, shape.block_size)
    with open_workers(persistent=False) as measure:
        turns = {case: measure(model, case, shape.micro, options.seconds) for case in CASES}
    rates = {case: turn["tokens_per_second"] for case, turn in turns.items()}
    data["rows"] = rows_of(samples, rates, whole)
    return SuiteResult(data, (table(data["rows"], samples, whole),))


def local_items_file(default: Config) -> Path | None:
    """Return the HellaSwag file that .config names or that was downloaded earlier. Download nothing."""
    config = load_config(".config") if Path(".config").is_file() else default
    path = config.evaluation.hellaswag_file or config.data.directory / FILE_NAME
    return path if path.is_file() else None


def choose_items(
    shape: Shape, file: Path | None, seed: int = 0
) -> tuple[list[hellaswag.Item], list[hellaswag.Item], str]:
    """Return all items, those to time, and their source in words. Without a file the items are synthetic."""
    items = hellaswag.load_items(file, 0) if file else synthetic_items(seed)
    source = f"the items of {file}" if file else "synthetic items with the token lengths of the real ones"
    if not 0 < shape.items < len(items):
        return items, items, source
    share = random.Random(seed).sample(items, shape.items)
    return items, share, f"{source}; timed: {shape.items} of them, drawn at random"


def synthetic_items(seed: int = 0) -> list[hellaswag.Item]:
    """Generate as many items as HellaSwag has, of random words, reproducible by seed. Each word is one token."""
    draw, words = random.Random(seed), one_token_words(tokenizer.load())
    items = []
    for count, query_tokens, ending_tokens in (VIDEO_CAPTIONS, WIKIHOW):
        for _ in range(count):
            query = " ".join(["the", *draw.choices(words, k=draw.randint(*query_tokens) - 1)])
            endings = tuple(
                " ".join(draw.choices(words, k=draw.randint(*ending_tokens)))
                for _ in range(hellaswag.ENDINGS)
            )
            items.append(hellaswag.Item(query, endings, draw.randrange(hellaswag.ENDINGS)))
    return items


def one_token_words(encoding: tiktoken.Encoding) -> list[str]:
    """Return the words that are one token after a space."""
    found = (re.fullmatch(rb" ([a-z]{2,})", token) for token in encoding.token_byte_values())
    return [match[1].decode() for match in found if match]


def scored_tokens(items: Sequence[hellaswag.Item], block_size: int) -> int:
    """Count the positions that the model computes, without padding, to score all endings of the items."""
    encoding = tokenizer.load()
    return sum(
        min(len(hellaswag.encode_pair(encoding, item.query, ending)[0]) - 1, block_size)
        for item in items
        for ending in item.endings
    )


def evaluate_once(shape: Shape, case: str, windows: int, items: list[hellaswag.Item]) -> Sample:
    """Evaluate a variant with the functions of a run, after one warm-up batch. Call in a worker.

    windows: number of validation windows, of random token ids. On a CPU the peak is growth of the process, with the
    buffers that its heap keeps.
    """
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    device, meter = resolved.device, PeakMeter(resolved.device)
    synchronise = device_synchroniser(device)
    precision: Callable[[], AbstractContextManager[Any]] = partial(autocast, device, resolved.dtype)
    at_once = validation.EVALUATION_TOKENS[resolved.device_type]
    batch = max(1, at_once // shape.block_size)
    size = (windows, shape.block_size + 1)
    ids = np.random.default_rng(0).integers(VOCABULARY, size=size).astype(np.uint16)
    model = build_model(*model_and_attention(shape, case))
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
        hellaswag_seconds = seconds_of(lambda: score(model, items, tokenizer.load(), autocast=precision))
    peak = meter.by_phase.get("evaluation", meter.peaks()["allocated"])
    tokens, item_tokens = windows * shape.block_size, scored_tokens(items, shape.block_size)
    return Sample(case, tokens, validation_seconds, len(items), item_tokens, hellaswag_seconds, peak)


def validations(whole: Whole, training_rate: float) -> int:
    """Count the validations of a run at this rate in tokens/s: one at each grid point inside it and one at its end."""
    tokens = int(whole.run_seconds * training_rate)
    return max(1, -(-tokens // whole.interval_tokens)) if whole.interval_tokens else 1


def rows_of(
    samples: Sequence[Sample], training_rates: Mapping[str, float], whole: Whole
) -> list[dict[str, Any]]:
    """Return one row a variant, each value extrapolated from a share by its tokens, as `spread` over the rounds."""
    rows = []
    for case, rate in training_rates.items():
        measured = [sample for sample in samples if sample.case == case]
        seconds = [s.validation_seconds * whole.validation_tokens / s.validation_tokens for s in measured]
        count = validations(whole, rate)
        rows.append(
            {
                "case": case,
                "hellaswag_seconds": spread(
                    [s.hellaswag_seconds * whole.item_tokens / s.item_tokens for s in measured]
                ),
                "validation_seconds": spread(seconds),
                "validations": count,
                "training_tokens_per_second": rate,
                "validation_share": spread([count * value / whole.run_seconds for value in seconds]),
                "peak_bytes": max(sample.peak_bytes for sample in measured),
            }
        )
    return rows


COLUMNS: Columns = {
    "variant": lambda row: row["case"],
    "HellaSwag s": lambda row: format_spread(row["hellaswag_seconds"], ".1f"),
    "one validation s": lambda row: format_spread(row["validation_seconds"], ".2f"),
    "validations": lambda row: str(row["validations"]),
    "% of a run": lambda row: format_spread(row["validation_share"], ".2f", 100),
    "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
}


def table(rows: list[dict[str, Any]], samples: Sequence[Sample], whole: Whole) -> ResultTable:
    """List the rows. Notes state the extrapolations and the source of the number of validations."""
    timed, notes = samples[0], [f"{len(samples) // len(rows)} rounds, median [{INTERVAL}]"]
    if timed.items < whole.items:
        notes.append(f"HellaSwag s is EXTRAPOLATED by tokens from {timed.items} items to all {whole.items:,}")
    if timed.validation_tokens < whole.validation_tokens:
        source = f"from {timed.validation_tokens:,} tokens to all {whole.validation_tokens:,}"
        notes.append(f"one validation s is EXTRAPOLATED {source}")
    rates = ", ".join(f"{row['case']} {row['training_tokens_per_second']:,.0f}" for row in rows)
    notes.append(
        f"validations of a run: every {whole.interval_tokens:,} training tokens and at the end, in "
        f"{whole.run_seconds:g} s at the training speed measured here ({rates} tokens/s)"
    )
    return ResultTable.of("cost of evaluation", COLUMNS, rows, [*notes, GOAL])


SUITE = Suite(
    "evaluation",
    "seconds of HellaSwag and of a validation, and their share of a run",
    run,
    shape="the first shape whose name contains this",
    rounds={"cpu": 3, "cuda": 3},
    seconds={"cpu": 6.0, "cuda": 6.0},
)

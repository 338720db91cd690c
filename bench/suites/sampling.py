"""Measure tokens/s of sampling with and without a cache: `make bench SUITE=sampling`.

The modes of a case take turns in its process. The model has its initial weights and the arithmetic of `make sample`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.case_step import model_and_parts
from bench.cases import Sizes, find_shapes
from bench.runner import case_worker
from bench.suite import (
    INTERVAL,
    Columns,
    ResultTable,
    Suite,
    SuiteResult,
    SuiteSession,
    format_spread,
    spread,
)
from gpt2.clocks import device_synchroniser
from gpt2.initial_weights import initialise
from gpt2.sampling import Cache, sample
from gpt2.training_step import build_model
from runtime.resolve import resolve
from runtime.settings import ANY_TARGET

CASES = ("B", "RAALL", "RALEARN")
TEXTS = (1, 8)


@dataclass(frozen=True)
class SampledShape(Sizes):
    """A model, and how many tokens each text begins with and gets."""

    prompt: int = 16
    new: int = 32


SHAPES = {
    "cpu": (
        SampledShape("6x384-t256", 6, 6, 384, 256, prompt=32, new=96),
        SampledShape("124m-t256", 12, 12, 768, 256, prompt=32, new=96),
    ),
    "card": (SampledShape("124m-t1024", 12, 12, 768, 1024, prompt=128, new=512),),
}


@dataclass(frozen=True)
class Turn:
    """One drawing of `texts` texts. tokens: of the first text, to compare the modes."""

    case: str
    cached: bool
    texts: int
    seconds: float
    tokens_per_second: float
    tokens: list[int]


def run(session: SuiteSession) -> SuiteResult:
    """Draw texts in every mode once a round. Save after every case."""
    shapes = find_shapes(SHAPES[session.resolved.device_class], session.shape)
    shapes = shapes if session.shape else shapes[:1]
    results: list[dict[str, Any]] = []
    for shape in shapes:
        turns: list[Turn] = []
        for case in session.cases.split() or CASES:
            with case_worker(shape, case, 1) as worker:
                turns += worker.call(measure, shape, case, session.rounds)
            session.say(f"{shape.name}, {case}: measured")
            session.save(
                {"shapes": [*results, {"shape": asdict(shape), "turns": [asdict(turn) for turn in turns]}]}
            )
        results.append({"shape": asdict(shape), "turns": [asdict(turn) for turn in turns]})
    return SuiteResult({"shapes": results}, tuple(map(table, results)))


def measure(shape: SampledShape, case: str, rounds: int) -> list[Turn]:
    """Draw every number of texts with and without a cache, once to warm up and then once a round. Call in a worker."""
    device = resolve(ANY_TARGET).device_type
    synchronise = device_synchroniser(device)
    config, parts = model_and_parts(shape, case)
    model = build_model(config, parts)
    initialise(model, 0)
    model = model.eval().to(device)
    turns = []
    for number in range(rounds + 1):
        for texts in TEXTS:
            for cached in (True, False):
                prompts_BT = (
                    torch.arange(texts * shape.prompt, device=device).view(texts, -1) % config.vocabulary
                )
                generators = [torch.Generator().manual_seed(n) for n in range(texts)]
                synchronise()
                began = time.perf_counter()
                drawn = sample(model, prompts_BT, shape.new, generators, Cache() if cached else None)
                synchronise()
                seconds = time.perf_counter() - began
                if number:
                    rate = texts * shape.new / seconds
                    turns.append(Turn(case, cached, texts, seconds, rate, drawn.tokens[0].tolist()))
    return turns


def rows_of(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each case and number of texts. ratio: with the cache to without it, of each round."""
    rows = []
    for case, texts in dict.fromkeys((turn["case"], turn["texts"]) for turn in turns):
        chosen = [turn for turn in turns if (turn["case"], turn["texts"]) == (case, texts)]
        with_cache, without = (
            [turn for turn in chosen if turn["cached"] is cached] for cached in (True, False)
        )
        pairs = list(zip(with_cache, without, strict=True))
        rates = [[turn["tokens_per_second"] for turn in part] for part in (with_cache, without)]
        rows.append(
            {
                "case": case,
                "texts": texts,
                "cached": spread(rates[0]),
                "uncached": spread(rates[1]),
                "ratio": spread(
                    [one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs]
                ),
                "equal": all(one["tokens"] == other["tokens"] for one, other in pairs),
            }
        )
    return rows


def table(result: dict[str, Any]) -> ResultTable:
    shape = result["shape"]
    columns: Columns = {
        "case": lambda row: str(row["case"]),
        "texts": lambda row: str(row["texts"]),
        "tokens/s, cache": lambda row: format_spread(row["cached"], ",.0f"),
        "tokens/s, no cache": lambda row: format_spread(row["uncached"], ",.0f"),
        "ratio": lambda row: format_spread(row["ratio"], ".1f"),
        "tokens": lambda row: "equal" if row["equal"] else "differ",
    }
    title = (
        f"{shape['name']}: {shape['new']} new tokens after {shape['prompt']}, tokens/s of all texts together"
    )
    return ResultTable.of(title, columns, rows_of(result["turns"]), (f"median and {INTERVAL}",))


SUITE = Suite(
    "sampling",
    "tokens/s of sampling with and without a cache of queries, keys and values",
    run,
    shape="part of the shape's name; without it the first shape",
    rounds={"cpu": 6, "card": 6},
    cases='only these arms, such as "B GATED"',
)

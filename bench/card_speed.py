"""Time training steps, an evaluation and the kernels of a step on a card. Nothing here is judged."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.card_checks import CardCheck, CheckedDevice, NotRunError, judge, not_run, number
from bench.case_step import Change, case_step, kernels, make_stepper, model_and_parts, model_config
from bench.cases import BASELINE, LEARNED, PLAIN, SHAPES, Shape
from bench.runner import BenchError, case_worker, measure_case
from gpt2 import hellaswag, tokenizer, validation
from gpt2.clocks import device_synchroniser
from gpt2.initial_weights import initialise
from gpt2.loss import standard_loss
from gpt2.training_step import Stepper, autocast, build_model
from runtime import attention_kernels
from runtime.batch_plan import largest_micro_batch
from runtime.gpu_specs import GIB
from runtime.settings import ANY_TARGET, GPT2

SMALL = Shape("2x64-t64", 2, 2, 64, 64, plain_micro=8)
SECONDS = {False: 4.0, True: 0.2}  # of timed steps of a case
SEQUENCE_BYTES = 0.6 * GIB  # of a card's memory for each sequence of 1024 tokens in a micro-batch
LIMIT_SECONDS = 300.0
Span = tuple[float, float]


@dataclass(frozen=True)
class ExpectedSpeed:
    """Computed without a card, for 124M at T = 1024 and micro-batch 64; see docs/card.md."""

    speed: Span  # tokens/s of B
    mfu: Span  # of B
    learned: Span  # RALEARN's step in B's


EXPECTED = {
    "h200": ExpectedSpeed((450e3, 520e3), (0.36, 0.42), (1.15, 1.22)),
    "h100": ExpectedSpeed((405e3, 470e3), (0.33, 0.38), (1.15, 1.22)),
    "a100-40g": ExpectedSpeed((160e3, 190e3), (0.41, 0.49), (1.11, 1.15)),
    "w7900": ExpectedSpeed((35e3, 58e3), (0.23, 0.38), (1.15, 1.25)),
}
# Computed for an H200: B's tokens/s in those of the plain step at the same micro-batch and at 12, seconds of evaluation
PLAIN_SAME, PLAIN_DEFAULT = (0.97, 1.04), (1.05, 1.18)
EVALUATION = {"validation": (0.8, 1.5), "HellaSwag": (8.0, 10.0)}


def shape_of(card: CheckedDevice) -> Shape:
    return SMALL if card.on_cpu else SHAPES["card"][0]


def largest_micro(card: CheckedDevice) -> int:
    """Return the micro-batch of the speeds: at most 64 on a card, less where its memory is small."""
    shape = shape_of(card)
    fits = max(1, int(card.resolved.memory_bytes / SEQUENCE_BYTES))
    return shape.plain_micro if card.on_cpu else largest_micro_batch(shape.effective, 1, min(64, fits))


def expected_speed(card: CheckedDevice) -> ExpectedSpeed | None:
    return EXPECTED.get(card.resolved.target.name)


def span(ends: Span | None, form: str) -> str:
    """Write an expectation; empty without one."""
    return "{:{form}} to {:{form}}".format(*ends, form=form) if ends else ""


def speed_line(case: str, shape: Shape, micro: int) -> str:
    return f"speed: {case}, {shape.name}, micro-batch {micro}"


def timed(card: CheckedDevice, case: str, micro: int) -> Iterator[CardCheck]:
    """Time a case in a new worker: its tokens/s, and on a known card its MFU. No line where it does not fit."""
    shape = shape_of(card)
    name = speed_line(case, shape, micro)
    expected = expected_speed(card) if (case, micro) == (BASELINE, 64) else None
    try:
        sample = measure_case(shape, case, micro, SECONDS[card.on_cpu])
    except BenchError as error:
        if "out of memory" not in f"{error}".lower():
            raise
        yield not_run(name, "tokens/s", f"{error}")
        return
    speed, peak = sample["tokens_per_second"], card.resolved.target.peak_flops
    memory = "" if card.on_cpu else f", peak {sample['peak_bytes'] / GIB:.2f} GiB"
    yield number(
        name, span(expected.speed if expected else None, ",.0f"), f"{speed:,.0f} tokens/s{memory}", speed
    )
    if peak:
        mfu = speed * sample["flops_per_token"] / peak
        yield number(f"{name}, MFU", span(expected.mfu if expected else None, ".2f"), f"{mfu:.3f}", mfu)


def ratio(card: CheckedDevice, name: str, ends: Span | None, above: str, below: str) -> Iterator[CardCheck]:
    """Divide the values of two lines, of this command or an earlier one."""
    if above in card.values and below in card.values:
        value = card.values[above] / card.values[below]
        yield number(name, span(None if card.on_cpu else ends, ".2f"), f"{value:.3f}", value)


def speed_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Time B, then RALEARN: the first proves that compilation, kernels, loss and optimizer work."""
    shape, micro = shape_of(card), largest_micro(card)
    for case in (BASELINE, LEARNED):
        yield from timed(card, case, micro)
    expected = expected_speed(card)
    baseline, learned = (speed_line(case, shape, micro) for case in (BASELINE, LEARNED))
    name = "speed: RALEARN's step in B's"
    yield from ratio(card, name, expected.learned if expected else None, baseline, learned)


def plain_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Time the standard step at the micro-batch of B."""
    shape, micro = shape_of(card), largest_micro(card)
    yield from timed(card, PLAIN, micro)
    lines = [speed_line(case, shape, micro) for case in (BASELINE, PLAIN)]
    yield from ratio(card, "speed: B's in that of the standard step", PLAIN_SAME, *lines)


def default_micro_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Time the standard step at nanoGPT's micro-batch, 12."""
    shape = shape_of(card)
    yield from timed(card, PLAIN, shape.plain_micro)
    lines = (speed_line(BASELINE, shape, largest_micro(card)), speed_line(PLAIN, shape, shape.plain_micro))
    name = f"speed: B's in that of the standard step at micro-batch {shape.plain_micro}"
    yield from ratio(card, name, PLAIN_DEFAULT, *lines)


def head_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Say whether a step takes gpt2.loss.fast_loss; compare the speed of B with that of the standard loss."""
    shape, micro = shape_of(card), largest_micro(card)
    name, expected = "gates: the faster head", "the loss and gradients of eager code"
    if card.on_cpu:
        yield not_run(name, expected, "a study on a CPU does not compile")
    else:
        with case_worker(shape, BASELINE, micro) as worker:
            notes = worker.call(head_notes, shape, micro, limit_seconds=LIMIT_SECONDS)
        yield judge(name, expected, notes or "agrees", not notes)
    for label, change, ends in CHANGES:
        speed = measure_case(shape, BASELINE, micro, SECONDS[card.on_cpu], change)["tokens_per_second"]
        name = f"{speed_line(BASELINE, shape, micro)}, {label}"
        yield number(name, "", f"{speed:,.0f} tokens/s", speed)
        others = (name, speed_line(BASELINE, shape, micro))
        yield from ratio(card, f"speed: B's {label}, in B's", ends, *others)


def standard_head(stepper: Stepper) -> None:
    """Take the loss of a step on a card that does not agree with the faster one."""
    if stepper.compile:
        stepper.loss = standard_loss()


def bfloat16_residual(stepper: Stepper) -> None:
    """Do as CONFIG_RESIDUAL_BF16=y."""
    stepper.model.bfloat16_residual = True


CHANGES: tuple[tuple[str, Change, Span], ...] = (
    ("standard head", standard_head, (0.97, 0.98)),
    ("bfloat16 residual", bfloat16_residual, (1.06, 1.08)),
)


def head_notes(shape: Shape, micro: int) -> str:
    """Return why a step does not take the faster loss or compiled losses of rows; "" where it does."""
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    return "; ".join(make_stepper(shape, BASELINE, micro, resolved, shape.effective).notes)


# ---- evaluation


# Items of each source in HellaSwag's validation set, and ranges of the tokens of a query and of an ending. Lengths
# drawn evenly from these ranges have the means of the real ones and about their spread.
VIDEO_CAPTIONS, WIKIHOW = (3243, (14, 44), (4, 24)), (6799, (41, 78), (21, 53))
WINDOWS, ITEMS = {False: 1024, True: 16}, {False: 10_042, True: 20}


def evaluation_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Time a validation and HellaSwag of B. The items are made up, with the token lengths of the published ones."""
    shape, windows = shape_of(card), WINDOWS[card.on_cpu]
    items = random.Random(0).sample(made_up_items(), ITEMS[card.on_cpu])
    with case_worker(shape, BASELINE, 1) as worker:
        seconds = worker.call(evaluate_once, shape, windows, items, limit_seconds=LIMIT_SECONDS)
    tokens = windows * shape.block_size
    known = EVALUATION if card.resolved.target.name == "h200" else {}
    for name, count in (("validation", f"{tokens:,} tokens"), ("HellaSwag", f"{len(items):,} items")):
        expected = span(known.get(name), ".1f")
        yield number(f"evaluation: {name} of {count}", expected, f"{seconds[name]:.2f} s", seconds[name])


def made_up_items(seed: int = 0) -> list[hellaswag.Item]:
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


def evaluate_once(shape: Shape, windows: int, items: list[hellaswag.Item]) -> dict[str, float]:
    """Return the seconds of a validation and of HellaSwag with the functions of a run, after one warm-up batch.

    windows: number of validation windows, of random token ids. Call in a worker.
    """
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    device = resolved.device
    synchronise = device_synchroniser(device)
    precision: Callable[[], AbstractContextManager[Any]] = partial(autocast, device, resolved.dtype)
    at_once = validation.evaluation_tokens(device)
    batch = max(1, at_once // shape.block_size)
    size = (windows, shape.block_size + 1)
    ids = np.random.default_rng(0).integers(GPT2.size, size=size).astype(np.uint16)
    model = build_model(*model_and_parts(shape, BASELINE))
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
            "HellaSwag": seconds_of(lambda: score(model, items, encoding, autocast=precision)),
        }


# ---- kernels of a step


LARGEST = 8  # operations of a step, by their time on the device


def profile_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """List the operations of a step that take the most time."""
    shape, micro = shape_of(card), largest_micro(card)
    for case in (BASELINE, LEARNED):
        with case_worker(shape, case, micro) as worker:
            rows = worker.call(profile_step, shape, case, micro, limit_seconds=LIMIT_SECONDS)
        for milliseconds, calls, operation in rows:
            name = f"profile: {case}, {operation}"
            yield number(name, "", f"{milliseconds:.2f} ms a step in {calls} calls", milliseconds)
    if not rows:
        raise NotRunError("the profiler saw no operation")


def profile_step(shape: Shape, case: str, micro: int) -> list[tuple[float, int, str]]:
    """Return milliseconds, calls and name of the largest operations of one step. Call in a worker."""
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    on_cpu = resolved.device == "cpu"
    with kernels(case, resolved):
        step, _ = case_step(shape, case, micro, resolved)
        for number_of in range(2):
            step(number_of)
        with torch.profiler.profile() as profiler:
            step(2)
            device_synchroniser(resolved.device)()
    rows = [
        ((row.self_cpu_time_total if on_cpu else row.self_device_time_total) / 1e3, row.count, row.key[:80])
        for row in profiler.key_averages()
    ]
    return sorted(rows, reverse=True)[:LARGEST]

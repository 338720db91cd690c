"""Check that no output depends on a later input, or on the length of the input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2.transformer import CausalSelfAttention, LearnedPosition
from ra.admission.probe import (
    BFLOAT16_ROUNDING,
    VOCABULARY,
    Probe,
    at_steps,
    difference,
    examined_part,
    inputs,
    pristine,
    row_rounding,
    run,
    run_autocast,
    seed_generators,
    shape_rounding,
    working_dtype,
)
from ra.admission.results import Violation, violation

CAUSAL = "causal"
LENGTH = "length"
MASK = "mask the scores of j > i after every transposition, or call self.fused(q, k, v), which masks them"
PAST = "compute position i from positions 0 .. i alone, without statistics over time"
MODES = {True: "training", False: "evaluation"}
LARGE_BATCH = 32  # sequences: more than an attention may treat in another way than a few
LOUD = 30.0  # of the changed inputs, relative to the others: a maximum or a norm over time shows


class Leak(NamedTuple):
    """Relative change of the outputs before position `cut`, and the first position that changes."""

    size: float
    position: int
    cut: int


def cuts(tokens: int) -> list[int]:
    """First changed positions: the second, around the middle, around 64, the last ones."""
    wanted = (1, 2, tokens // 2, 64, 65, tokens - 2, tokens - 1)
    return sorted({cut for cut in wanted if 0 < cut < tokens})


def changed_after(x_BTC: Tensor, cut: int, scale: float = 1.0) -> Tensor:
    """x with other values at positions cut .. T-1."""
    other = inputs(*x_BTC.shape, x_BTC.dtype, seed=cut + 1)
    return torch.cat([x_BTC[:, :cut], scale * other[:, cut:]], 1)


def future_leak(function: Callable[[Tensor], Tensor], x_BTC: Tensor, positions: list[int]) -> Iterator[Leak]:
    """Change the inputs from each cut on; yield the change of the outputs before it. The last cut is used twice."""
    whole = function(x_BTC)
    for number, cut in enumerate([*positions, positions[-1]]):
        scale = LOUD if number % 2 else 1.0
        after = function(changed_after(x_BTC, cut, scale))
        yield Leak(*difference(whole[:, :cut], after[:, :cut]), cut)


def first_above(allowed: float, leaks: Iterator[Leak]) -> Leak | None:
    return next((leak for leak in leaks if leak.size > allowed), None)


def causal(probe: Probe) -> Iterator[Violation]:
    """No output depends on a later input: forward, backward and within the model."""
    yield from _forward(probe)
    yield from _every_position(probe)
    yield from _full_block(probe)
    yield from _study_shape(probe)
    yield from _later_steps(probe)
    yield from _autocast(probe)
    yield from _backward(probe)
    yield from _in_model(probe)


def _leak(layer: int | None, module: object, leak: Leak, setting: str) -> Violation:
    size, position, cut = leak
    return violation(
        f"the output at position {position} changes by {size:.2g} of the largest output when only positions "
        f"{cut} and later change ({setting}): it depends on the future",
        MASK if isinstance(module, CausalSelfAttention) else PAST,
        module,
        layer=layer,
        position=position,
        size=size,
    )


def _forward(probe: Probe) -> Iterator[Violation]:
    plans = [("perturbed", dtype, number == 0) for number, dtype in enumerate(probe.dtypes)]
    plans.append(("initial", probe.dtypes[0], False))
    for weights, dtype, thorough in plans:
        x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
        positions = cuts(probe.ordinary) if thorough else cuts(probe.ordinary)[-1:]
        for layer, module in probe.parts(weights, dtype):
            allowed = row_rounding(working_dtype(module, probe.shape.width, dtype), probe.ordinary)
            for training in (True, False):
                function = functools.partial(run, module, training=training)
                leak = first_above(allowed, future_leak(function, x_BTC, positions))
                if leak:
                    setting = f"{MODES[training]}, {probe.ordinary} tokens, {weights} weights, {_name(dtype)}"
                    yield _leak(layer, module, leak, setting)


def _every_position(probe: Probe) -> Iterator[Violation]:
    """Each row of a batch changes from another position on, so that no single position is left out."""
    dtype = probe.dtypes[-1]
    x_BTC = inputs(1, probe.ordinary, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype, edges=True):
        allowed = row_rounding(working_dtype(module, probe.shape.width, dtype), probe.ordinary)
        for training in (True, False):
            function = functools.partial(run, module, training=training)
            for rows in torch.arange(1, probe.ordinary).split(LARGE_BATCH):
                leak = _leak_of_rows(function, x_BTC.expand(len(rows), -1, -1), rows.tolist(), allowed)
                if leak:
                    setting = f"{MODES[training]}, {len(rows)} sequences of {probe.ordinary} tokens"
                    yield _leak(layer, module, leak, setting)
                    break


def _leak_of_rows(
    function: Callable[[Tensor], Tensor], x_BTC: Tensor, positions: list[int], allowed: float
) -> Leak | None:
    """Change row r of equal rows from positions[r] on; the largest leak.

    It is measured again with all rows changed at that position: the check "batch" is for what rows do to each other.
    """
    other_BTC = changed_after(x_BTC[:1], 0)
    whole = function(x_BTC)
    later = torch.arange(x_BTC.shape[1]) >= torch.tensor(positions)[:, None]
    after = function(torch.where(later[..., None], other_BTC, x_BTC))
    leaks = [
        Leak(*difference(whole[row : row + 1, :cut], after[row : row + 1, :cut]), cut)
        for row, cut in enumerate(positions)
    ]
    largest = max(leaks, key=lambda leak: leak.size)
    if largest.size <= allowed:
        return None
    return first_above(allowed, future_leak(function, x_BTC, [largest.cut]))


def _later_steps(probe: Probe) -> Iterator[Violation]:
    """No leak at any training step, where `begin_step` sets what depends on the step."""
    dtype = probe.dtypes[-1]
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype, edges=True):
        allowed = row_rounding(working_dtype(module, probe.shape.width, dtype), probe.ordinary)
        for when, later in at_steps(module):
            for training in (True, False):
                function = functools.partial(run, later, training=training)
                leak = first_above(allowed, future_leak(function, x_BTC, cuts(probe.ordinary)[::3]))
                if leak:
                    yield _leak(layer, module, leak, MODES[training] + when)
                    return


def _autocast(probe: Probe) -> Iterator[Violation]:
    """Under the study's bfloat16 autocast, where an attention may take another path."""
    if not probe.autocast or torch.float32 not in probe.dtypes:
        return
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, torch.float32)
    for layer, module in probe.parts("perturbed", torch.float32):
        for training in (True, False):
            function = functools.partial(run_autocast, module, training=training)
            leak = first_above(BFLOAT16_ROUNDING, future_leak(function, x_BTC, cuts(probe.ordinary)[::3]))
            if leak:
                yield _leak(layer, module, leak, f"{MODES[training]}, bfloat16 autocast")
                break


def _full_block(probe: Probe) -> Iterator[Violation]:
    """A few layers at the study's block size."""
    if probe.full <= probe.ordinary:
        return
    dtype = probe.dtypes[-1]
    x_BTC = inputs(1, probe.full, probe.shape.width, dtype)
    step = max(64, probe.full // 8)  # edges of the chunks of a chunked attention
    positions = sorted({1, probe.full // 2, *range(step, probe.full, step), probe.full - 1})
    for layer, module in probe.parts("perturbed", dtype, edges=True):
        allowed = row_rounding(working_dtype(module, probe.shape.width, dtype), probe.full)
        for training in (True, False):
            function = functools.partial(run, module, training=training)
            leak = first_above(allowed, future_leak(function, x_BTC, positions))
            if leak:
                yield _leak(layer, module, leak, f"{MODES[training]}, {probe.full} tokens")


def _study_shape(probe: Probe) -> Iterator[Violation]:
    """The first and the last layer with all heads of the study."""
    if probe.shape == probe.study:
        return
    dtype, width = probe.dtypes[-1], probe.study.width
    x_BTC = inputs(1, probe.ordinary, width, dtype)
    for layer in sorted({probe.layers[0], probe.layers[-1]}):
        module = examined_part(probe.model("perturbed", dtype, probe.study, (layer,)), 0)
        for training in (True, False):
            function = functools.partial(run, module, training=training)
            leak = first_above(
                row_rounding(dtype, probe.ordinary), future_leak(function, x_BTC, [probe.ordinary - 1])
            )
            if leak:
                yield _leak(layer, module, leak, f"{MODES[training]}, {probe.study.heads} heads")


def _backward(probe: Probe) -> Iterator[Violation]:
    """Gradients of earlier outputs with respect to later inputs are zero."""
    dtype = probe.dtypes[0]
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype).clone().requires_grad_()
    weight_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype, seed=99)
    for layer, module in probe.parts("perturbed", dtype):
        allowed = row_rounding(working_dtype(module, probe.shape.width, dtype), probe.ordinary)
        for cut in cuts(probe.ordinary)[1::2]:
            y_BTC = run(module, x_BTC, training=True, grad=True)
            if not y_BTC.requires_grad:  # the check "gradients" reports it
                break
            (gradient,) = torch.autograd.grad(
                (y_BTC * weight_BTC)[:, :cut].sum(), x_BTC, allow_unused=True, materialize_grads=True
            )
            later_T = gradient[:, cut:].abs().amax((0, 2))
            size = float(later_T.max() / gradient.abs().max().clamp_min(1e-30))
            if size > allowed:  # NaN is for the check "finite"
                position = cut + int(later_T.argmax())
                yield violation(
                    f"backward: the gradient of outputs before position {cut} with respect to the input at position "
                    f"{position} is {size:.2g} of the largest gradient; it must be zero",
                    "correct the backward of the custom function, or mask the scores before it",
                    module,
                    layer=layer,
                    position=position,
                    size=size,
                )
                break


def _in_model(probe: Probe) -> Iterator[Violation]:
    """Logits of a model of a few layers, from token to token."""
    dtype = probe.dtypes[0]
    chosen = tuple(probe.layers[number] for number in probe.edges)
    model = probe.model("perturbed", dtype, None, chosen)
    ids_BT = torch.arange(2 * probe.ordinary).view(2, -1) * 7 % VOCABULARY
    allowed = 100 * row_rounding(
        working_dtype(examined_part(model, 0), probe.shape.width, dtype), probe.ordinary
    )
    for training in (True, False):
        before = run_model(model, ids_BT, training)
        for cut in cuts(probe.ordinary)[::3]:
            changed = torch.cat([ids_BT[:, :cut], (ids_BT[:, cut:] + 11) % VOCABULARY], 1)
            after = run_model(model, changed, training)
            leak = Leak(*difference(before[:, :cut], after[:, :cut]), cut)
            if leak.size > allowed:
                setting = f"logits of a model of layers {list(chosen)}, {MODES[training]}"
                yield _leak(None, examined_part(model, 0), leak, setting)
                break


def run_model(model: torch.nn.Module, ids_BT: Tensor, training: bool) -> Tensor:
    """Logits of one pass on a copy of the model."""
    seed_generators()
    with torch.no_grad():
        logits: Tensor = pristine(model).train(training)(ids_BT)
    return logits


def length(probe: Probe) -> Iterator[Violation]:
    """The outputs of a shorter input are the first outputs of a longer one; positions may begin at any token."""
    yield from _starts(probe)
    yield from _unrotated(probe)
    dtype = probe.dtypes[0]
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype):
        working = working_dtype(module, probe.shape.width, dtype)
        modes = (False,) if getattr(module, "stochastic", False) else (True, False)
        for training in modes:  # draws depend on the length
            whole = run(module, x_BTC, training)
            scale = whole.abs().max()
            for tokens in probe.lengths[:-1]:
                part = run(module, x_BTC[:, :tokens], training)
                size, position = difference(whole[:, :tokens], part)
                size *= float(whole[:, :tokens].abs().max() / scale)
                if size > shape_rounding(working, probe.ordinary, probe.shape.width):
                    yield violation(
                        f"the output at position {position} of the first {tokens} tokens differs by {size:.2g} of the "
                        f"largest output from that of all {probe.ordinary} tokens ({MODES[training]}): it depends on "
                        "the length of the input",
                        "compute position i from positions 0 .. i alone, without T and without statistics over time",
                        module,
                        layer=layer,
                        position=position,
                        size=size,
                    )
                    break


def _starts(probe: Probe) -> Iterator[Violation]:
    """Positions from `start` on are the last ones of all, as sampling with a cache needs them."""
    dtype, shape = probe.dtypes[0], probe.shape
    position: Any = probe.model("perturbed", dtype).position
    if type(position) is LearnedPosition or probe.ordinary < 2:
        return
    x_BTC = inputs(2, probe.ordinary, shape.width, dtype)
    q_BTHD = x_BTC.view(2, probe.ordinary, shape.heads, -1)

    def computed(start: int) -> Tensor:
        parts = [position(x_BTC[:, start:] * 1, start=start)]
        if hasattr(position, "rotate"):
            rotated = position.rotate(*2 * [q_BTHD[:, start:].transpose(1, 2) * 1], start=start)
            parts += [part.transpose(1, 2).flatten(2) for part in rotated]
        return torch.cat(parts, 2)

    with torch.no_grad():
        whole = computed(0)
        for start in (1, probe.ordinary // 2):
            size, first = difference(whole[:, start:], computed(start))
            if size > shape_rounding(dtype, probe.ordinary, shape.width):
                yield violation(
                    f"with start={start}, the position module gives position {start + first} another output, by "
                    f"{size:.2g} of the largest, than with all {probe.ordinary} tokens: sampling with a cache would "
                    "compute another model",
                    "use start as the position of the first token, in forward and in rotate",
                    position,
                    position=start + first,
                    size=size,
                )
                return


def _unrotated(probe: Probe) -> Iterator[Violation]:
    """Every attention rotates its queries and keys where the position module does that."""
    model: Any = pristine(probe.model("perturbed", probe.dtypes[0]))
    if not hasattr(model.position, "rotate"):
        return
    rotating: set[int] = set()

    def noted(number: int, rotate: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        rotating.add(number)
        return rotate(*arguments, **options)

    for number, block in enumerate(model.blocks):
        block.attention.rotate = functools.partial(noted, number, block.attention.rotate)
    run_model(model, torch.zeros(1, 2, dtype=torch.int64), False)
    for number, block in enumerate(model.blocks):
        if number not in rotating:
            yield violation(
                "the attention does not rotate its queries and keys, so it knows no positions",
                "call self.project(x), or self.positioned(q, k)",
                block.attention,
                layer=probe.layers[number],
            )
            return


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

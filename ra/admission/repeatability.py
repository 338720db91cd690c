"""Check that an attention is one function: of its input alone, in both modes, for each sequence by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gpt2.model.transformer import GPT2
from ra.admission.causality import MODES, run_model
from ra.admission.probe import (
    VOCABULARY,
    Probe,
    difference,
    examined_part,
    inputs,
    pristine,
    row_rounding,
    run,
    shape_rounding,
    working_dtype,
)
from ra.admission.violation import Violation, violation

DETERMINISTIC, STATE, MODE, BATCH = "deterministic", "state", "mode", "batch"
RANDOM_FIX = (
    "remove the random draw, or set `stochastic = True` on the module and draw only where self.training"
)
STATE_FIX = "compute the output from x alone and keep nothing on the module between calls"


def stochastic(module: nn.Module) -> bool:
    """Whether the variant declares that its training passes draw random numbers."""
    return bool(getattr(module, "stochastic", False))


def deterministic(probe: Probe) -> Iterator[Violation]:
    """Equal instances from one seed, equal outputs of two calls, nothing kept between calls."""
    yield from _instances(probe)
    dtype, width = probe.dtypes[-1], probe.shape.width
    tokens = max(probe.ordinary // 2, 1)
    a_BTC, b_BTC = (inputs(2, tokens, width, dtype, seed) for seed in (0, 1))
    short_BTC = inputs(3, max(tokens // 2, 1), width, dtype, 2)
    for layer, module in probe.parts("perturbed", dtype):
        allowed = row_rounding(working_dtype(module, width, dtype), tokens)
        for training in (True, False):
            used = pristine(module).train(training)
            for grad in (False, True):
                # the generators are seeded once, so that the second call draws other numbers
                first = run(used, a_BTC, training, grad, copied=False).detach()
                with torch.set_grad_enabled(grad):
                    second = used(a_BTC.clone()).detach()
                changed = _kept(used, a_BTC, b_BTC, short_BTC, training, grad)
                random = difference(first, second)
                kept = max(difference(first, other) for other in changed)
                how = f"{MODES[training]}, {'with' if grad else 'without'} gradients"
                if random[0] > allowed and not (training and stochastic(module)):
                    what, fix = "two calls on one input", RANDOM_FIX
                    if kept[0] > allowed:
                        fix = STATE_FIX
                    yield _differ(layer, module, what, random, how, fix)
                    break
                if kept[0] > allowed:
                    what = "the same call after calls on other inputs"
                    yield _differ(layer, module, what, kept, how, STATE_FIX)
                    break
    yield from _dropout_in_evaluation(probe)


def _kept(
    used: nn.Module, a_BTC: Tensor, b_BTC: Tensor, short_BTC: Tensor, training: bool, grad: bool
) -> list[Tensor]:
    """The outputs for input a after input b, and after a shorter input."""
    outputs = []
    for other in (b_BTC, short_BTC):
        run(used, other, training, grad, copied=False)
        outputs.append(run(used, a_BTC, training, grad, copied=False).detach())
    return outputs


def _differ(
    layer: int, module: nn.Module, what: str, found: tuple[float, int], how: str, fix: str
) -> Violation:
    size, position = found
    message = f"{what}: the output at position {position} differs by {size:.2g} of the largest output ({how})"
    return violation(message, fix, module, layer=layer, position=position, size=size)


def _instances(probe: Probe) -> Iterator[Violation]:
    """Two instances from one seed have equal parameters and buffers."""
    first, second = (probe.build(probe.shape, tuple(probe.layers)) for _ in range(2))
    for number, layer in enumerate(probe.layers):
        states = [_tensors(examined_part(model, number)) for model in (first, second)]
        for name, value in states[0].items():
            other = states[1].get(name)
            if other is None or value.shape != other.shape or not torch.equal(value, other):
                yield violation(
                    f"two instances built from one seed differ in {name}",
                    "draw with torch in __init__, without a generator or seed of its own: torch's generator is seeded",
                    examined_part(first, number),
                    layer=layer,
                )
                return


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _dropout_in_evaluation(probe: Probe) -> Iterator[Violation]:
    """With dropout, evaluation still draws nothing."""
    layer, dtype = probe.layers[0], probe.dtypes[-1]
    module = examined_part(probe.model("perturbed", dtype, None, (layer,), 0.5), 0)
    x_BTC = inputs(2, min(17, probe.ordinary), probe.shape.width, dtype)
    used = pristine(module).eval()
    first = run(used, x_BTC, training=False, copied=False)
    with torch.no_grad():
        found = difference(first, used(x_BTC.clone()))
    if found[0] > row_rounding(dtype, x_BTC.shape[1]):
        what, how = "two calls on one input", "evaluation of a model with dropout 0.5"
        yield _differ(layer, module, what, found, how, "apply dropout only where self.training")


def state(probe: Probe) -> Iterator[Violation]:
    """Calls change no parameter, no buffer and not the set of saved tensors. A cache may be added or resized."""
    dtype = probe.dtypes[-1]
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype):
        used = pristine(module)
        before = {name: value.detach().clone() for name, value in _tensors(used).items()}
        saved = {name: value.shape for name, value in used.state_dict().items()}
        for training in (True, False):
            run(used, x_BTC, training, copied=False)
        after = _tensors(used)
        changed = [
            name
            for name, value in before.items()
            if name not in after or (value.shape == after[name].shape and not torch.equal(value, after[name]))
        ]
        if changed:
            yield violation(
                f"a call changes {changed[0]}: the function depends on the number of calls, so on micro-batches, "
                "evaluations and resumption",
                f"{STATE_FIX}; begin_step(iteration) may set what depends on the step",
                module,
                layer=layer,
            )
        elif saved != {name: value.shape for name, value in used.state_dict().items()}:
            yield violation(
                "a call adds or resizes a saved buffer, so a checkpoint cannot be loaded",
                "register_buffer(..., persistent=False) for a cache",
                module,
                layer=layer,
            )


def mode(probe: Probe) -> Iterator[Violation]:
    """Training and evaluation, with and without gradients, compute one function (dropout 0)."""
    dtype = probe.dtypes[0]
    x_BTC = inputs(2, probe.ordinary, probe.shape.width, dtype)
    for layer, module in probe.parts("perturbed", dtype):
        allowed = shape_rounding(
            working_dtype(module, probe.shape.width, dtype), probe.ordinary, probe.shape.width
        )
        outputs = {
            (training, grad): run(module, x_BTC, training, grad).detach()
            for training in (True, False)
            for grad in (True, False)
        }
        pairs = [((False, True), (False, False)), ((True, True), (True, False))]
        if not stochastic(module):
            pairs.insert(0, ((True, True), (False, False)))
        for one, other in pairs:
            found = difference(outputs[one], outputs[other])
            if found[0] > allowed:
                names = [
                    f"{MODES[training]} {'with' if grad else 'without'} gradients"
                    for training, grad in (one, other)
                ]
                fix = "compute one function, or set `stochastic = True` on the module if training draws random numbers"
                yield _differ(layer, module, " and ".join(names), found, "dropout 0", fix)
                break
    model, ids_BT = _whole(probe)
    if not any(map(stochastic, model.modules())):
        found = difference(run_model(model, ids_BT, True), run_model(model, ids_BT, False))
        yield from _in_model(probe, model, found, "training and evaluation", "compute one function")


def _whole(probe: Probe) -> tuple[GPT2, Tensor]:
    """A model of a few layers, and token ids (2, T): the final norm and values between layers are seen here alone."""
    chosen = tuple(probe.layers[number] for number in probe.edges)
    ids_BT = torch.arange(2 * min(33, probe.ordinary)).view(2, -1) * 7 % VOCABULARY
    return probe.model("perturbed", probe.dtypes[0], None, chosen), ids_BT


def _in_model(
    probe: Probe, model: GPT2, found: tuple[float, int], what: str, fix: str
) -> Iterator[Violation]:
    working = working_dtype(examined_part(model, 0), probe.shape.width, probe.dtypes[0])
    if found[0] > 100 * shape_rounding(working, probe.ordinary, probe.shape.width):
        message = (
            f"{what}: the logits of a model at position {found[1]} differ by {found[0]:.2g} of the largest"
        )
        yield violation(message, fix, examined_part(model, 0), position=found[1], size=found[0])


def batch(probe: Probe) -> Iterator[Violation]:
    """A sequence's output depends on no other sequence, nor on the batch's order or split."""
    dtype, tokens = probe.dtypes[0], min(33, probe.ordinary)
    x_BTC = inputs(4, tokens, probe.shape.width, dtype)
    others = torch.cat([x_BTC[:1], 3 * inputs(3, tokens, probe.shape.width, dtype, seed=5)])
    order = torch.tensor([2, 0, 3, 1])
    for layer, module in probe.parts("perturbed", dtype):
        working = working_dtype(module, probe.shape.width, dtype)
        exact, loose = row_rounding(working, tokens), shape_rounding(working, tokens, probe.shape.width)
        for training in (True, False):

            def output(x: Tensor) -> Tensor:
                y_BTC: Tensor = run(module, x, training and not stochastic(module))  # noqa: B023
                return y_BTC

            whole = output(x_BTC)
            found = [
                ("the other sequences of the batch changed", exact, whole[:1], output(others)[:1]),
                ("the batch in another order", loose, whole[order], output(x_BTC[order])),
            ]
            found += [
                (
                    f"micro-batches of {rows}",
                    loose,
                    whole,
                    torch.cat([output(part) for part in x_BTC.split(rows)]),
                )
                for rows in (1, 2)
            ]
            wrong = next(
                (
                    (what, seen)
                    for what, allowed, expected, actual in found
                    if (seen := difference(expected, actual))[0] > allowed
                ),
                None,
            )
            if wrong:
                fix = "use no mean, norm or index over dimension 0, the batch"
                yield _differ(layer, module, wrong[0], wrong[1], MODES[training], fix)
                break
        else:
            yield from _batch_gradient(layer, module, x_BTC, exact)
    model, ids_BT = _whole(probe)
    whole, fix = run_model(model, ids_BT, False), "use no mean, norm or index over dimension 0, the batch"
    found_alone = difference(whole[:1], run_model(model, ids_BT[:1], False))
    yield from _in_model(probe, model, found_alone, "a sequence alone and in a batch", fix)


def _batch_gradient(layer: int, module: nn.Module, x_BTC: Tensor, allowed: float) -> Iterator[Violation]:
    """The gradient of one sequence's output with respect to another sequence is zero."""
    leaf = x_BTC.clone().requires_grad_()
    y_BTC = run(module, leaf, training=True, grad=True)
    if not y_BTC.requires_grad:
        return
    (gradient,) = torch.autograd.grad(
        (y_BTC * inputs(*x_BTC.shape, x_BTC.dtype, seed=9))[:1].sum(),
        leaf,
        allow_unused=True,
        materialize_grads=True,
    )
    size = float(gradient[1:].abs().max() / gradient.abs().max().clamp_min(1e-30))
    if size > allowed:
        yield violation(
            f"backward: the gradient of sequence 0 with respect to the others is {size:.2g} of the largest gradient",
            "correct the backward of the custom function",
            module,
            layer=layer,
            size=size,
        )

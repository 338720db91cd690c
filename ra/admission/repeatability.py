"""Check that an attention is one function: of its input alone, in both modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpt2.transformer import GPT2
from ra.admission.causality import MODES, run_model
from ra.admission.probe import (
    VOCABULARY,
    Probe,
    at_steps,
    difference,
    examined_part,
    inputs,
    pristine,
    row_rounding,
    run,
    shape_rounding,
    working_dtype,
)
from ra.admission.results import Violation, violation
from ra.global_state import GENERATORS, TORCH

DETERMINISTIC, STATE, MODE = "deterministic", "state", "mode"
RANDOM_FIX = (
    "remove the random draw, or set `stochastic = True` on the module and draw only where self.training"
)
STEP_FIX = (
    "define begin_step(iteration), which is called before each training step, for what depends on the step"
)
WEIGHTS_FIX = "keep nothing that depends on weights between calls, or clear it in train()"
MANY_CALLS = 1_000_000
OTHER_SEED = 20_011  # that no variant sets by chance
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
        yield from _memory(layer, module, a_BTC, b_BTC, allowed)
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
                    yield differ(layer, module, what, random, how, fix)
                    break
                if kept[0] > allowed:
                    what = "the same call after calls on other inputs"
                    yield differ(layer, module, what, kept, how, STATE_FIX)
                    break
    yield from _dropout_in_evaluation(probe)


def _memory(
    layer: int, module: nn.Module, a_BTC: Tensor, b_BTC: Tensor, allowed: float
) -> Iterator[Violation]:
    """What a module keeps beside its buffers: values of training, of former weights, numbers of calls."""
    used, fresh = pristine(module), pristine(module)
    if used is fresh:  # it cannot be copied
        return
    expected = run(fresh, a_BTC, training=False)
    for x_BTC in (b_BTC, a_BTC, b_BTC):
        run(used, x_BTC, training=True, grad=True, copied=False)
    if _changed(_tensors(fresh), used):
        return  # the check "state" reports it
    found = difference(expected, run(used, a_BTC, training=False, copied=False))
    if found[0] > allowed:
        what = "evaluation before and after training passes"
        yield differ(layer, module, what, found, MODES[False], STATE_FIX)
        return
    counters = _counters(used)
    run(used, a_BTC, training=True, copied=False)
    expected = run(used, a_BTC, training=False, copied=False)
    moved = [(*key, value) for key, value in _counters(used).items() if counters.get(key, value) != value]
    with contextlib.suppress(Exception):  # such as a position in a ring, which is then beyond its end
        for part, name, value in moved:
            setattr(part, name, value + MANY_CALLS * (value - counters[part, name]))
        found = difference(expected, run(used, a_BTC, training=False, copied=False))
        if found[0] > allowed:
            how = f"evaluation, {moved[0][1]} as after {MANY_CALLS} calls"
            yield differ(layer, module, "few and many calls", found, how, STEP_FIX)
            return
    for part, name, value in moved:
        setattr(part, name, value)
    for one in (used, fresh):
        one.train()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.25)
    for training in (True, False):
        expected = run(fresh, a_BTC, training)
        found = difference(expected, run(used, a_BTC, training, copied=False))
        if found[0] > allowed:
            what = "a module called before its weights change and one that was not"
            yield differ(layer, module, what, found, MODES[training], WEIGHTS_FIX)
            return


def _counters(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """The numbers that a module and its parts have as attributes, also as tensors: (part, name) -> value."""
    attributes = [(part, name, value) for part in module.modules() for name, value in vars(part).items()]
    numbers = {
        (part, name): value
        for part, name, value in attributes
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    tensors = {
        (part, name): value.detach().clone()
        for part, name, value in attributes
        if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool
    }
    return numbers | tensors


def _kept(
    used: nn.Module, a_BTC: Tensor, b_BTC: Tensor, short_BTC: Tensor, training: bool, grad: bool
) -> list[Tensor]:
    """The outputs for input a after input b, and after a shorter input."""
    outputs = []
    for other in (b_BTC, short_BTC):
        run(used, other, training, grad, copied=False)
        outputs.append(run(used, a_BTC, training, grad, copied=False).detach())
    return outputs


def differ(
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


def _changed(before: dict[str, Tensor], module: nn.Module) -> list[str]:
    """The parameters and buffers with other values. A cache may be resized."""
    after = _tensors(module)
    return [
        name
        for name, value in before.items()
        if name not in after or (value.shape == after[name].shape and not torch.equal(value, after[name]))
    ]


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
        yield differ(layer, module, what, found, how, "apply dropout only where self.training")


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
        changed = _changed(before, used)
        if generator := _changed_generator(used, x_BTC):
            yield violation(
                f"a call changes the state of {generator}: the numbers of other modules would depend on it",
                "draw from torch's generator in training alone, with `stochastic = True`, and seed none",
                module,
                layer=layer,
            )
        elif changed:
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


def _changed_generator(module: nn.Module, x_BTC: Tensor) -> str:
    """Name the generator that a call seeds, or draws from although the module does not declare it; "" if none."""
    torch.default_generator.manual_seed(OTHER_SEED)
    before = {name: read() for name, read in GENERATORS.items()}
    with torch.no_grad():
        module.train()(x_BTC * 1)
    drawn = any(map(stochastic, module.modules())) and torch.initial_seed() == OTHER_SEED
    changed = [name for name, read in GENERATORS.items() if read() != before[name]]
    return next((name for name in changed if not (drawn and name == TORCH)), "")


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
                yield differ(layer, module, " and ".join(names), found, "dropout 0", fix)
                break
        else:
            yield from _compiled(layer, module, x_BTC, allowed)
    yield from _longer_modes(probe)
    model, ids_BT = whole_model(probe)
    if not any(map(stochastic, model.modules())):
        found = difference(run_model(model, ids_BT, True), run_model(model, ids_BT, False))
        yield from in_model(probe, model, found, "training and evaluation", "compute one function")


def _compiled(layer: int, module: nn.Module, x_BTC: Tensor, allowed: float) -> Iterator[Violation]:
    """Training may be compiled; evaluation is not. A path for compilation must compute the same function."""
    plain = run(module, x_BTC)
    try:
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            compiled = run(module, x_BTC)
    except Exception:  # a path that runs in a compiled model alone
        return
    found = difference(plain, compiled)
    if found[0] > allowed:
        what = "passes with and without torch.compiler.is_compiling()"
        fix = "compute one function in both: training may be compiled, evaluation is not"
        yield differ(layer, module, what, found, MODES[True], fix)


def _longer_modes(probe: Probe) -> Iterator[Violation]:
    """Training and evaluation at the block size and at later steps."""
    dtype, width = probe.dtypes[-1], probe.shape.width
    whole_BTC = inputs(1, probe.full, width, dtype)
    part_BTC = inputs(2, probe.ordinary, width, dtype)
    for layer, module in probe.parts("perturbed", dtype, edges=True):
        if stochastic(module):
            continue
        allowed = shape_rounding(working_dtype(module, width, dtype), probe.full, width)
        cases = [(f"{probe.full} tokens", module, whole_BTC)]
        cases += [(f"dropout 0{when}", later, part_BTC) for when, later in at_steps(module)]
        for how, one, x_BTC in cases:
            found = difference(run(one, x_BTC, training=True), run(one, x_BTC, training=False))
            if found[0] > allowed:
                yield differ(layer, module, "training and evaluation", found, how, "compute one function")
                return


def whole_model(probe: Probe) -> tuple[GPT2, Tensor]:
    """A model of a few layers, and token ids (2, T): the final norm and values between layers are seen here alone."""
    chosen = tuple(probe.layers[number] for number in probe.edges)
    ids_BT = torch.arange(2 * min(33, probe.ordinary)).view(2, -1) * 7 % VOCABULARY
    return probe.model("perturbed", probe.dtypes[0], None, chosen), ids_BT


def in_model(probe: Probe, model: GPT2, found: tuple[float, int], what: str, fix: str) -> Iterator[Violation]:
    working = working_dtype(examined_part(model, 0), probe.shape.width, probe.dtypes[0])
    if found[0] > 100 * shape_rounding(working, probe.ordinary, probe.shape.width):
        message = (
            f"{what}: the logits of a model at position {found[1]} differ by {found[0]:.2g} of the largest"
        )
        yield violation(message, fix, examined_part(model, 0), position=found[1], size=found[0])

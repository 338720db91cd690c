"""Run a module's forward in a context, and its backward in the same context.

Backward runs the forward again, so that what backward computes (recomputed activations, gradients of a replaced
function) is replaced as well. It costs a second forward of the module, and keeps its inputs alone until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from numerics.errors import NumericsError
from numerics.fixes.passes import FIRST, REPLAYED, running

TWICE = b"a module with a fix has no second derivative; fix: remove the fix of a module that is differentiated twice"
SPARSE = (
    "a module with a fix has a sparse gradient, which torch cannot convert; fix: sparse=False in F.embedding, or a fix "
    "without this module"
)
Finish = Callable[[Sequence[Tensor]], Any]  # outputs -> the result, in the context of the computation
Compute = Callable[[Sequence[Tensor], bool, Finish], Any]  # (tensors, whether this is the first time, finish)


def forked_rng(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Return a context that restores the random generators of the CPU and of the tensors' devices."""
    numbers = {one.device.index or 0 for one in tensors if one.device.type not in ("cpu", "meta")}
    return torch.random.fork_rng(sorted(numbers), device_type=_accelerator(tensors))


def _accelerator(tensors: Sequence[Tensor]) -> str:
    return next((one.device.type for one in tensors if one.device.type not in ("cpu", "meta")), "cpu")


def device_types(tensors: Sequence[Tensor]) -> list[str]:
    """Return the types of the tensors' devices, and "cpu"."""
    return sorted({"cpu"} | {tensor.device.type for tensor in tensors})


class Autocast:
    """The state of autocast in this thread. `restored` sets it elsewhere, without the cache of cast weights.

    The cache holds casts without a graph where a forward ran without gradients.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.states = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices
            if device != "meta"
        }

    @property
    def enabled(self) -> bool:
        return any(enabled for enabled, _ in self.states.values())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, (enabled, dtype) in self.states.items():
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device in self.states:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield


class BackwardReplay:
    """A computation on tensors that backward repeats with the same random numbers and autocast."""

    def __init__(self, compute: Compute, tensors: Sequence[Tensor]) -> None:
        self.compute = compute
        self.autocast = Autocast(device_types(tensors))
        self.state = torch.get_rng_state()
        self.devices, self.states = get_device_states(*tensors)

    def again(self, tensors: Sequence[Tensor], finish: Finish) -> Any:
        """Compute a second time, with gradients, and return the result of `finish`."""
        with forked_rng(tensors), self.autocast.restored(), torch.enable_grad(), running(REPLAYED):
            torch.set_rng_state(self.state)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=_accelerator(tensors))
            return self.compute(tensors, False, finish)


class _Replayed(torch.autograd.Function):
    """The outputs of a Replay. Saves its tensors alone."""

    @staticmethod
    def forward(ctx: Any, replay: BackwardReplay, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with replay.autocast.restored(), running(FIRST):
            outputs: tuple[Tensor, ...] = replay.compute(tensors, True, tuple)
        ctx.mark_non_differentiable(
            *[one for one in outputs if not (one.is_floating_point() or one.is_complex())]
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *received: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _Replayed._gradients(ctx, received)
        if not torch.is_grad_enabled():
            return found
        # with create_graph=True: an error in a second backward, whether or not what was received has a graph
        delayed: Any = torch._C._functions.DelayedError(TWICE, len(found))
        copies = [one if one is None else one.detach().requires_grad_() for one in found]
        second: tuple[Tensor | None, ...] = delayed(*copies)
        return second

    @staticmethod
    def _gradients(ctx: Any, received: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        copies = [
            tensor.detach().requires_grad_() if need else tensor.detach()
            for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        wanted = [copy for copy, need in zip(copies, needed, strict=True) if need]

        def gradients(outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, received, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if not pairs:
                return [None] * len(wanted)
            ends, starts = zip(*pairs, strict=True)
            # torch.autograd.grad would leave the modes that the context has entered
            engine: Any = torch.autograd.Variable._execution_engine
            with ctx.replay.autocast.disabled():  # as in every backward
                try:
                    result: Sequence[Tensor | None] = engine.run_backward(
                        ends,
                        starts,
                        False,
                        False,
                        tuple(wanted),
                        allow_unreachable=True,
                        accumulate_grad=False,
                    )
                except RuntimeError as error:
                    if "different layout" in str(error):
                        raise NumericsError(SPARSE) from error
                    raise
            return result

        found: Sequence[Tensor | None] = ctx.replay.again(copies, gradients)
        rest = iter(found)
        return None, *[next(rest) if need else None for need in needed]


def replayed(compute: Compute, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the outputs of `compute` on the tensors. Where a gradient is needed, backward repeats the computation."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        outputs: Sequence[Tensor] = _Replayed.apply(BackwardReplay(compute, tensors), *tensors)
        return outputs
    found: Sequence[Tensor] = compute(tensors, True, tuple)
    return found

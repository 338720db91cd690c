"""Convert the tensors of a computation to the CPU or to a wider format, and its results back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numerics.describe import WITHOUT_FLOAT64
from numerics.fixes.contexts import WideCasts, narrower, wide_defaults
from numerics.fixes.replay import Autocast, device_types
from numerics.fixes.small import HALF

CPU, UPCAST, SMALL = "cpu", "upcast", "small"
KINDS = (CPU, UPCAST, SMALL)


@dataclass(frozen=True)
class Conversion:
    """wide: the format of an up-cast computation; None: formats stay. home: the device of the results, or None.

    autocast: of the computation where it is moved to the CPU.
    """

    wide: torch.dtype | None = None
    home: torch.device | None = None
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, kind: str, tensors: Sequence[Tensor]) -> Conversion:
        """Return the conversion of a computation on `tensors`.

        An up-cast computation has float32 where half precision or autocast is found, else float64, which is computed on
        the CPU where the device has none.
        """
        state = Autocast(device_types(tensors))
        if kind == UPCAST:
            half = state.enabled or any(tensor.dtype in HALF for tensor in tensors)
            lacking = (one.device for one in tensors if one.device.type in WITHOUT_FLOAT64)
            home = None if half else next(lacking, None)
            return cls(wide=torch.float32 if half else torch.float64, home=home)
        if kind == CPU:
            home = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
            dtype = next((dtype for enabled, dtype in state.states.values() if enabled), None)
            return cls(home=home, autocast=dtype if home else None)
        return cls()

    def into(self, tensor: Tensor) -> Tensor:
        tensor = tensor.cpu() if self.home else tensor
        if self.wide and narrower(tensor.dtype, self.wide):
            return tensor.to(self.wide)
        if self.wide and tensor.is_complex() and tensor.dtype.itemsize < 2 * self.wide.itemsize:
            return tensor.to(self.wide.to_complex())
        return tensor

    def back(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
        """Convert results back. dtypes: of an up-cast computation's results; empty: they stay wide."""
        with torch._C.DisableTorchFunction():  # the context has no say in it
            if dtypes:
                tensors = [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
            if self.home:
                return tuple(tensor.to(self.home) for tensor in tensors)
        return tuple(tensors)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Return the context of the computation. It disables autocast where the format is wide."""
        with contextlib.ExitStack() as stack:
            if self.wide:
                stack.enter_context(wide_defaults(self.wide))
                stack.enter_context(WideCasts(self.wide))
            if self.autocast:
                stack.enter_context(torch.autocast("cpu", dtype=self.autocast, cache_enabled=False))
            yield

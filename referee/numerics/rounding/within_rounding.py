"""Judge a call by the rounding of its own inputs: the one meaning of "within rounding" of every command.

A call has inputs x, received gradients g, and results and gradients y. u is half the machine epsilon of its coarsest
dtype. y* is the call in float64 on x and g, with attention by its definition. It is computed four more times with each
x and g changed to x (1 + u z), z normal, and so are plain numbers and what backward keeps of the forward. spread_i is
the root mean square (rms) of the changes of element i.

    unit_i = sqrt((u |y*_i|)^2 + spread_i^2) + smallest number of the dtype,    e = |y - y*|
    error  = max(rms(e) / rms(unit), max_i e_i / (unit_i + rms(unit)) / sqrt(2 ln elements))
    within rounding: error <= 8 max(1, sqrt(n) / 8)
    n      = max(|largest| / |smallest|, sqrt(|largest| |second| / |smallest|)), of the sizes of the call's tensors

Derivation. A stable kernel returns the exact result of inputs that are off by some u, rounded to the dtype (mixed
stability: Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 1.5); `unit` is the first-order
effect of independent errors of this size. Sums of n terms grow with sqrt(n) (Higham and Mary, "A New Approach to
Probabilistic Rounding Error Analysis", 2019). The root of |a| |b| / |t| is the inner size of a product a b = t.
sqrt(2 ln N) is the expected largest of N normal numbers. 8 is about twice the largest error of torch's correct kernels
(`python -m tests.referee.numerics.rounding.correct_kernels`).

Limits. The spread of random numbers has no end, so that a call is "random" and not judged where it draws from a
generator or two runs in float64 differ. Integers are compared where the draws agree. In 16 bits errors of less than the
format are invisible, so that a function is also run in float32. The spread of a whole model is its condition number:
judge its calls. A wrong formula that is its own reference passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from referee.numerics.describe import tensors_in

BOUND = 8.0  # units, for sums of up to 64 terms
DRAWS, CONFIRMING = 4, 16
RANDOM = "random"
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Error:
    """The error of one result or gradient of a call. It is within rounding where units <= bound."""

    part: str  # "result 0", or "gradient 1" of the floating inputs in order
    units: float  # of rounding; infinite for another shape, dtype class, or NaN
    bound: float  # units that rounding explains; infinite where nothing is judged
    dtype: torch.dtype | None = None
    why: str = ""  # RANDOM, or what no number says, as "shape [2] against [3]"

    @property
    def within(self) -> bool:
        return self.units <= self.bound


@dataclass(frozen=True)
class CallOutput:
    """Results, and gradients of the floating inputs by their order; None where there is none."""

    results: Sequence[Tensor]
    gradients: Sequence[Tensor | None] = ()

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return each tensor by its name, as in `Error`."""
        return {
            f"{kind} {place}": tensor
            for kind, tensors in (("result", self.results), ("gradient", self.gradients))
            for place, tensor in enumerate(tensors)
            if tensor is not None
        }


@dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments. received: gradients of the results, in order; None without a backward.

    wanted: which floating inputs need a gradient, in order; all where it is None.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    received: Sequence[Tensor | None] | None = None
    wanted: Sequence[bool] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Return the floating inputs."""
        return [tensor for tensor in tensors_in([list(self.args), dict(self.kwargs)]) if is_number(tensor)]

    def run(self, change: Change, dtype: torch.dtype | None = None, stored: bool = False) -> CallOutput:
        """Run forward and backward on changed copies of the tensors.

        dtype: in place of floating dtypes given. stored: whether plain numbers that float32 does not hold, and what
        backward keeps of the forward, are changed, too.
        """
        leaves: list[Tensor] = []
        memory: set[int] = set()  # of the arguments

        def prepare(tensor: Tensor) -> Tensor:
            changed = change(tensor.detach())
            leaf = changed.clone() if changed.data_ptr() == tensor.data_ptr() else changed
            if is_number(tensor):
                place = len(leaves)
                needed = self.received is not None and (self.wanted is None or bool(self.wanted[place]))
                leaves.append(leaf.requires_grad_(needed))
                leaf = leaf.clone() if needed else leaf  # a leaf that needs a gradient cannot be overwritten
            memory.add(leaf.untyped_storage().data_ptr())
            return leaf

        def keep(tensor: Tensor) -> Tensor:
            is_argument = tensor.untyped_storage().data_ptr() in memory
            return change(tensor) if stored and is_number(tensor) and not is_argument else tensor

        number = change if stored else None
        args, kwargs = (
            converted(part, prepare, dtype, number) for part in (list(self.args), dict(self.kwargs))
        )
        with (
            torch.enable_grad(),
            saved_tensors_hooks(keep, lambda tensor: tensor) if stored else nullcontext(),
        ):
            output = self.function(*args, **kwargs)
            results = tensors_in(list(output) if isinstance(output, tuple) else output)
            pairs = [
                (result, change(gradient).to(result))
                for result, gradient in zip(results, self.received or (), strict=False)
                if gradient is not None and result.requires_grad and gradient.shape == result.shape
            ]
            needed = [leaf for leaf in leaves if leaf.requires_grad]
            passed: Iterator[Tensor | None] = iter(())
            if pairs and needed:
                outputs, received = zip(*pairs, strict=True)
                passed = iter(torch.autograd.grad(outputs, needed, received, allow_unused=True))
        gradients = [next(passed, None) if leaf.requires_grad else None for leaf in leaves]
        return CallOutput([result.detach() for result in results], gradients)


class DefaultEps(TorchFunctionMode):
    """Give rms_norm the eps that it would choose for another dtype; its default is the eps of its dtype."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "").partition(".")[0] in ("rms_norm", "_fused_rms_norm"):
            if len(args) > 3:
                args = (*args[:3], self.eps if args[3] is None else args[3])
            elif kwargs.get("eps") is None:
                kwargs["eps"] = self.eps
        return func(*args, **kwargs)


@dataclass
class Float64Reference:
    """A call in float64 on the CPU, and what rounding does to its results.

    An error beyond the bound is measured again with more draws: four may by chance be alike, or miss a jump.
    """

    exact: CallOutput
    draw: Callable[[float], CallOutput]  # of a size, in u
    draws: list[CallOutput]
    u: float
    bound: float
    _confirming: list[CallOutput] = field(default_factory=list)

    def errors(self, done: CallOutput) -> list[Error]:
        """Measure results and gradients. A gradient that is None is not measured."""
        if len(done.results) != len(self.exact.results):
            why = f"{len(done.results)} results, {len(self.exact.results)} in float64"
            return [Error("result", math.inf, self.bound, None, why)]
        pairs = zip(done.results, self.exact.results, strict=True)
        overflows = any(not x.isfinite().all() and bool(y.isfinite().all()) for x, y in pairs)
        # Gradients that are computed from a result that its dtype cannot hold are not judged.
        return [
            self.error(part, tensor)
            for part, tensor in done.parts.items()
            if part in self.exact.parts and not (overflows and part.startswith("gradient"))
        ]

    def error(self, part: str, tensor: Tensor) -> Error:
        """Measure one result or gradient."""
        exact = self.exact.parts[part]
        units, why = measured(tensor, exact, _samples(self.draws, part, exact), self.u, self.bound)
        if units > self.bound and tensor.shape == exact.shape:
            if not self._confirming:
                self._confirming = [self.draw(size) for size in (1.0, 2.0) for _ in range(CONFIRMING)]
            more = self._confirming if not is_number(tensor) else self._confirming[:CONFIRMING]
            samples = _samples([*self.draws, *more], part, exact)
            units, why = measured(tensor, exact, samples, self.u, self.bound)
        return Error(part, units, self.bound, tensor.dtype, why)


def _samples(draws: Sequence[CallOutput], part: str, exact: Tensor) -> list[Tensor]:
    """Return a part of the draws, without those of which a changed size has another shape."""
    found = [draw.parts[part] for draw in draws if part in draw.parts]
    return [tensor for tensor in found if tensor.shape == exact.shape] or [exact]


def within_rounding(call: FunctionCall, done: CallOutput) -> list[Error]:
    """Return the error of each result and gradient of a call, in units of rounding.

    call: what the results should be, with tensors in the dtype of the call. done: what they are; a gradient that is
    None is not measured. One error with why == RANDOM where the call is random. Whatever the function raises is passed
    on.
    """
    known = in_float64(call, coarsest(call, done))
    return known.errors(done) if known else [Error("results", 0.0, math.inf, None, RANDOM)]


def in_float64(call: FunctionCall, dtype: torch.dtype) -> Float64Reference | None:
    """Compute a call in float64 on the CPU, and again with changed inputs; None where it is random.

    dtype: the coarsest of the call.
    """
    u = torch.finfo(dtype).eps / 2
    generator = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def draw(size: float = 0.0) -> CallOutput:
        def changed(tensor: Tensor) -> Tensor:
            wide = widened(tensor)
            if not size or not is_number(tensor):
                return wide
            return wide * (1 + size * u * torch.randn(wide.shape, generator=generator, dtype=torch.float64))

        with sdpa_kernel(SDPBackend.MATH), DefaultEps(eps):
            return call.run(changed, torch.float64, stored=size > 0)

    exact = twice(draw)
    if exact is None:
        return None
    sizes = [tensor.numel() for tensor in (*call.tensors, *filter(is_number, exact.results))]
    bound = BOUND * max(1.0, math.sqrt(terms(sizes)) / 8)
    return Float64Reference(exact, draw, [draw(1.0) for _ in range(DRAWS)], u, bound)


def terms(sizes: Sequence[int]) -> float:
    """Return n, the longest sum that a call with tensors of these sizes can have."""
    known = sorted(size for size in sizes if size) or [1]
    second = known[-2] if len(known) > 2 else 0
    return max(known[-1] / known[0], math.sqrt(second * known[-1] / known[0]))


def twice(run: Callable[[], CallOutput]) -> CallOutput | None:
    """Return the result of a run; None where it draws random numbers, or a second run differs by more than rounding."""
    first = without_draws(run)
    if first is None:
        return None
    second = run().parts
    same = all(part in second and _is_close(tensor, second[part]) for part, tensor in first.parts.items())
    return first if same else None


def without_draws(run: Callable[[], CallOutput]) -> CallOutput | None:
    """Return the result of a run; None where it draws from a generator of torch."""
    before = generator_states()
    done = run()
    same = all(torch.equal(x, y) for x, y in zip(before, generator_states(), strict=True))
    return done if same else None


def generator_states() -> list[Tensor]:
    """Return the states of the default generators of the CPU and of an accelerator in use."""
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator()
    module: Any = torch.get_device_module(accelerator) if accelerator else None
    if module is not None and module.is_available() and hasattr(module, "get_rng_state"):
        states.append(module.get_rng_state())
    return states


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two runs are equal but for the order of sums: by half the digits of the dtype."""
    if one.shape != other.shape or not is_number(one):
        return torch.equal(one, other)
    x, y = real(one), real(other)
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    x, y = x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0)
    return bool((x - y).norm() <= torch.finfo(one.dtype).eps ** 0.5 * y.norm())


def measured(
    result: Tensor, exact: Tensor, samples: Sequence[Tensor], u: float, bound: float
) -> tuple[float, str]:
    """Return the error of a tensor in units of rounding, and what no number says.

    exact, samples: in float64, without and with changed inputs. Elements whose samples are not finite are left out.
    """
    if result.shape != exact.shape:
        return math.inf, f"shape {list(result.shape)} against {list(exact.shape)}"
    if not is_number(result) or not is_number(exact):
        agree = torch.ones(exact.shape, dtype=torch.bool)
        for sample in samples:
            agree &= sample == exact
        count = int((result.detach().cpu() != exact)[agree].sum())
        return (math.inf, f"{count:,} of {exact.numel():,} elements differ") if count else (0.0, "")
    limits = torch.finfo(result.dtype)
    x, y = real(result), real(exact)
    spread = torch.stack([(real(sample) - y).square() for sample in samples]).mean(0)
    unit = ((u * y.abs()).square() + spread).sqrt() + limits.tiny * limits.eps
    large = y.isfinite() & (y.abs() + bound * unit >= limits.max) & (x == y.sign() * math.inf)
    same = (x == y) | (x.isnan() & y.isnan()) | large  # infinities among them
    bad = ~same & (x.isfinite() != y.isfinite())
    bad |= ~same & ~y.isfinite()
    if count := int(bad.sum()):
        place = int(bad.flatten().nonzero()[0])
        return (
            math.inf,
            f"{count:,} elements: {float(x.flatten()[place])} where float64 has {y.flatten()[place]:.3g}",
        )
    usable = y.isfinite() & unit.isfinite() & ~large
    error, unit = (x - y).abs()[usable], unit[usable]
    if not error.numel() or not bool(error.any()):
        return 0.0, ""
    usual = rms(unit)
    highest = float((error / (unit + usual)).max()) / math.sqrt(2 * math.log(max(error.numel(), 2)))
    return max(rms(error) / usual, highest), ""


def coarsest(call: FunctionCall, done: CallOutput) -> torch.dtype:
    """Return the floating dtype of a call with the fewest digits."""
    tensors = [*call.tensors, *filter(is_number, done.results)]
    return max(
        (tensor.dtype for tensor in tensors), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64
    )


def converted(
    value: Any, change: Change, dtype: torch.dtype | None = None, number: Change | None = None
) -> Any:
    """Return nested arguments with changed tensors.

    dtype: in place of floating dtypes among the plain values. number: changes those that float32 does not hold.
    """

    def leaf(part: Any) -> Any:
        if isinstance(part, Tensor):
            return change(part)
        if isinstance(part, float) and number and part != float(torch.tensor(part)):
            return float(number(torch.tensor(part, dtype=torch.float64)))
        return dtype if isinstance(part, torch.dtype) and dtype and part.is_floating_point else part

    return tree_map(leaf, value)


def widened(tensor: Tensor) -> Tensor:
    """Return numbers in 64 bits a part, others as they are, on the CPU."""
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu()


def single(tensor: Tensor) -> Tensor:
    """Return a tensor of 16 bits in float32, others as they are."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def real(tensor: Tensor) -> Tensor:
    """Return numbers in float64 on the CPU; a complex one as two."""
    wide = widened(tensor.detach())
    return torch.view_as_real(wide.resolve_conj()) if wide.is_complex() else wide.double()


def rms(tensor: Tensor) -> float:
    """Return the root mean square, also where squares are below the smallest number."""
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(tensor.numel())


def is_number(tensor: Tensor) -> bool:
    """Return whether a tensor has real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()

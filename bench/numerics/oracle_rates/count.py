"""Count false alarms: `python -m bench.numerics.oracle_rates.count [--seeds 8] [--trials 20]`.

Two counts of tensors that are called wrong. "kernels": torch's kernels on this CPU, which are correct, for several
seeds, dtypes and shapes. "model": errors of exactly the size that the table allows, drawn as `RoundingErrors` draws
them: the least accurate correct kernel that the check knows of. Of those, by the number of elements: how many tensors
are beyond the first bound (4 runs), and how many are called wrong. Calls with a result of one element have 20 times
the trials.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.numerics.oracle_rates.kernels import Call, calls
from gpt2.system.errors import run_command
from numerics import check_operation
from numerics.oracle.check import random_gradients
from numerics.oracle.operation import Operation, Reference, judged, reference
from numerics.oracle.results import Check
from numerics.oracle.rounding_model.measure import STAGES, measure

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 33), (7, 65), (24, 48), (1, 16))
SIZES = (1, 15, 255)  # elements; above: the last class
# A zero vector divided by its norm + 1e-12, which float16 rounds to 0: the check is right that this is NaN.
UNDERFLOW = ("normalize", "normalize of an offset", "cosine_similarity")
DEVICE_SEED = 1 << 20


@dataclass
class Rate:
    """Tensors, those beyond the first bound, and those called wrong."""

    tensors: int = 0
    beyond: int = 0
    wrong: int = 0


@dataclass
class Rates:
    """Rates by number of elements. alarms: names of calls with a tensor that is called wrong."""

    by_size: dict[str, Rate] = field(default_factory=dict)
    alarms: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> Rate:
        parts = list(self.by_size.values())
        return Rate(*(sum(getattr(part, f.name) for part in parts) for f in dataclasses.fields(Rate)))


def size_class(elements: int) -> str:
    """Return the class of a number of elements, as "16 to 255"."""
    low = 1
    for high in SIZES:
        if elements <= high:
            return f"{low} to {high}" if high > low else str(high)
        low = high + 1
    return f"{low} and more"


def kernel_checks(seeds: Iterable[int]) -> Iterator[tuple[str, Check]]:
    """Check torch's kernels. Yields the name of the call and its checks, without those of UNDERFLOW in float16."""
    for seed in seeds:
        rows, width = SHAPES[seed % len(SHAPES)]
        for dtype in DTYPES:
            for name, function, args, options in calls(dtype, seed, rows, width):
                if dtype == torch.float16 and name in UNDERFLOW:
                    continue
                for check in check_operation(function, args, options, device="cpu"):
                    yield f"{name}, {check.dtype}, {rows} x {width}, seed {seed}", check


def model_rates(found: Iterable[Call], trials: int, backward: bool = True) -> Rates:
    """Draw errors of the size that the table allows and judge them."""
    rates = Rates()
    for name, function, args, options in found:
        operation = Operation(name, name, function, args, options)
        if backward:
            operation = dataclasses.replace(operation, received=random_gradients(operation))
        known = reference(operation)
        if not known.rules or operation.dtype is None:
            continue
        for trial in range(trials):
            _trial(name, known, trial, operation.dtype, rates)
    return rates


def scalar_calls(found: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls with a result of one element."""
    for call in found:
        _, function, args, options = call
        result = function(*args, **options)
        if isinstance(result, Tensor) and result.numel() == 1:
            yield call


def _trial(name: str, known: Reference, trial: int, dtype: torch.dtype, rates: Rates) -> None:
    device = known.draw(DEVICE_SEED + trial)
    first = STAGES[-1] * (trial + 1)  # no seed is shared by two trials
    mine = dataclasses.replace(known, draw=lambda seed: known.draw(first + seed), runs=0, _squares=([], []))
    mine.extend(STAGES[0])
    tensors = [
        (direction, place, result.to(dtype), exact)
        for direction, results, exacts in (
            ("forward", device.results, mine.exact.results),
            ("backward", device.gradients, mine.exact.gradients),
        )
        for place, (result, exact) in enumerate(zip(results, exacts, strict=True))
        if result is not None and exact is not None and result.is_floating_point() and result.numel()
    ]
    for direction, place, rounded, exact in tensors:
        rate = rates.by_size.setdefault(size_class(rounded.numel()), Rate())
        rate.tensors += 1
        rate.beyond += measure(rounded, exact, mine.sigma(direction, place), dtype).wrong
    for direction, place, rounded, _ in tensors:
        if judged(rounded, mine, direction, place, dtype, STAGES[0]).wrong:
            rates.by_size[size_class(rounded.numel())].wrong += 1
            rates.alarms[f"{name} {direction} {place}"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--trials", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    checks = wrong = 0
    for name, check in kernel_checks(range(given.seeds)):
        checks += 1
        wrong += check.wrong
        if check.wrong:
            print(f"wrong: {name}: {check.text}")
    print(f"kernels: {checks} checks, {wrong} wrong")
    for dtype in DTYPES:
        found = list(calls(dtype, 0, 7, 65))
        parts = {
            "": model_rates(found, given.trials),
            ", results of one element": model_rates(scalar_calls(found), 20 * given.trials, backward=False),
        }
        for title, rates in parts.items():
            print(f"model, {str(dtype).removeprefix('torch.')}{title}")
            for size, rate in [*sorted(rates.by_size.items()), ("all", rates.total)]:
                words = f"{rate.beyond} beyond the first bound ({rate.beyond / rate.tensors:.2%})"
                print(f"  {size} elements: {rate.tensors} tensors, {words}, {rate.wrong} wrong")
            for name, count in rates.alarms.items():
                print(f"  wrong: {name} ({count})")


if __name__ == "__main__":
    run_command(main)

"""Measure correct and wrong kernels in units of rounding: `python -m bench.measured_rounding [--seeds 2]`.

The calls are those of tests/referee/numerics/rounding, of which the tests run one size and seed.
"""

from __future__ import annotations

import argparse

import torch

from referee.numerics.rounding.within_rounding import BOUND, within_rounding
from runtime.errors import run_command
from tests.referee.numerics.rounding.correct_kernels import calls, received
from tests.referee.numerics.rounding.wrong_kernels import WRONG_KERNELS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((5, 33), (24, 48))


def correct(seeds: int) -> tuple[int, list[tuple[float, str]]]:
    """Return the number of calls, and the errors relative to a bound of BOUND with their calls, largest first."""
    count, errors = 0, []
    for dtype in DTYPES:
        for rows, width in SHAPES:
            for seed in range(seeds):
                for name, function, args, options in calls(dtype, seed, rows, width):
                    count += 1
                    gradients = received(function, args, options)
                    errors += [
                        (error.units * BOUND / error.bound, f"{name}, {error.part}, {error.dtype}")
                        for error in within_rounding(function, args, options, received=gradients)
                    ]
    return count, sorted(errors, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    count, errors = correct(given.seeds)
    units = [size for size, _ in errors]
    print(
        f"correct kernels: {count} calls, {len(units)} results and gradients, median {units[len(units) // 2]:.2g}, "
        f"99 % {units[len(units) // 100]:.2g}, largest {units[0]:.2g} ({errors[0][1]}), "
        f"{sum(size > BOUND for size in units)} beyond {BOUND:g}"
    )
    print("wrong kernel | units | bound | units in the dtype of the call | within rounding")
    for name, (function, inputs, right) in WRONG_KERNELS.items():
        gradients = received(right, inputs)
        found = within_rounding(function, inputs, received=gradients, reference=right)
        worst = max(found, key=lambda error: error.units / error.bound)
        usual = max(error.units for error in found if error.dtype == right(*inputs).dtype)
        print(f"{name} | {worst.units:.3g} | {worst.bound:.3g} | {usual:.3g} | {worst.within}")


if __name__ == "__main__":
    run_command(main)

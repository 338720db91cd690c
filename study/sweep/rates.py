"""Tune learning rates: the runs of a study with CONFIG_LEARNING_RATES, and the choice of a rate for each arm.

Tuning runs have their own seeds, which are never judged. The control arms are one function class, so they share one
choice. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ra.arms import split_rate, with_rate
from ra.names import is_control_arm
from runtime.dotconfig import Symbols, number_in
from runtime.errors import UserError
from runtime.settings import OPTIMIZER_NUMBERS
from study.records.plan_file import LearningRates

SYMBOL = "LEARNING_RATES"
FIRST_TUNING_SEED = 1000  # above every judged seed: CONFIG_SEEDS is 1000 at most
Table = Mapping[str, Mapping[str, Sequence[float | None]]]  # arm -> rate -> loss of each tuning seed in nats


def read_rates(symbols: Symbols, variants: Sequence[str]) -> LearningRates | None:
    """Read the rates, in ascending order; None without rates. ConfigError for rates that cannot be tuned."""
    typed = symbols.text(SYMBOL).split()
    if not typed:
        return None
    _, interval = OPTIMIZER_NUMBERS["learning_rate"]
    values: dict[float, str] = {}
    for rate in typed:
        value = None if "+" in rate else number_in(interval, rate)
        if value is None:
            raise symbols.error(
                SYMBOL, f'has {rate}, no number in {interval}; fix: use rates such as "3e-4 6e-4"'
            )
        if value in values:
            raise symbols.error(
                SYMBOL, f"has {values[value]} and {rate}, which are one rate; fix: remove one"
            )
        values[value] = rate
    if len(values) < 2:
        raise symbols.error(
            SYMBOL,
            'has one rate, so there is no choice; fix: name at least two, or CONFIG_LEARNING_RATES="" and '
            f"CONFIG_LEARNING_RATE={typed[0]}",
        )
    own = [name for name in variants if split_rate(name)[1]]
    if own:
        raise symbols.error(
            SYMBOL,
            f"crosses every arm with the rates, and {own[0]} has one; fix: remove +LR= from CONFIG_VARIANTS",
        )
    ascending = tuple(values[value] for value in sorted(values))
    return LearningRates(ascending, symbols.integer("TUNING_SEEDS"))


def tuning_runs(variants: Sequence[str], rates: LearningRates) -> list[tuple[str, int]]:
    """Return the (arm with its rate, seed) of every arm at every rate, ordered by seed."""
    return [
        (with_rate(name, rate), FIRST_TUNING_SEED + seed)
        for seed in range(rates.tuning_seeds)
        for name in variants
        for rate in rates.rates
    ]


def judged_runs(variants: Sequence[str], seeds: int, rates: LearningRates) -> list[tuple[str, int]]:
    """Return the (arm with its rate, seed) of the judged runs, ordered by seed.

    At each seed: every arm at its rate, then what separates the effect of an arm from that of its rate. Where the two
    rates differ, the arm also runs at the rate of the control arms, and the control arms run at the rate of the arm.
    """
    chosen = {name: rates.chosen[name] for name in variants if name in rates.chosen}
    common = control_rate(rates)
    names = [with_rate(name, rate) for name, rate in chosen.items()]
    if common:
        names += [with_rate(name, common) for name in chosen]
        controls = [name for name in chosen if is_control_arm(name)]
        names += [
            with_rate(name, rate) for rate in rates.rates if rate in chosen.values() for name in controls
        ]
    return [(name, seed) for seed in range(seeds) for name in dict.fromkeys(names)]


def most_runs(
    variants: Sequence[str], seeds: int, rates: LearningRates, one_rate: bool = False
) -> list[tuple[str, int]]:
    """Return every run. Arms without a chosen rate get the rates that need the most runs, or one_rate."""
    others = [name for name in variants if not is_control_arm(name)]
    start, *further = rates.rates
    most = {name: further[place % len(further)] for place, name in enumerate(others)}
    guessed = {name: start if one_rate else most.get(name, start) for name in variants}
    assumed = replace(rates, chosen=guessed | dict(rates.chosen))
    return tuning_runs(variants, rates) + judged_runs(variants, seeds, assumed)


def function_class(name: str, variants: Iterable[str]) -> list[str]:
    """Return the arms that share one choice with an arm: the control arms, or the arm alone."""
    return [other for other in variants if is_control_arm(other)] if is_control_arm(name) else [name]


def control_rate(rates: LearningRates) -> str:
    """Return the rate of the control arms; "" before it is chosen, and in a study without them."""
    return next((rate for name, rate in rates.chosen.items() if is_control_arm(name)), "")


def mean_losses(table: Table, rates: LearningRates) -> dict[str, float | None]:
    """Return rate -> mean loss over the tuning runs of all arms of the table; None where a loss is missing."""
    means: dict[str, float | None] = {}
    for rate in rates.rates:
        losses = [loss for by_rate in table.values() for loss in by_rate.get(rate, ())]
        known = [loss for loss in losses if loss is not None]
        whole = len(known) == len(table) * rates.tuning_seeds
        means[rate] = sum(known) / len(known) if whole and known else None
    return means


def choose(table: Table, rates: LearningRates) -> LearningRates:
    """Return the rates with a choice for each arm of the table: the lowest mean loss over the tuning seeds.

    The control arms share the mean over all of them. A rate is not eligible for an arm with a missing loss there. An
    existing choice stays. UserError for an arm without an eligible rate.
    """
    chosen = dict(rates.chosen)
    for name in (name for name in table if name not in chosen):
        group = {other: table[other] for other in function_class(name, table)}
        shared = control_rate(replace(rates, chosen=chosen)) if is_control_arm(name) else ""
        chosen[name] = shared or _lowest(name, mean_losses(group, rates))
    return replace(rates, chosen=chosen)


def _lowest(name: str, means: Mapping[str, float | None]) -> str:
    eligible = {rate: loss for rate, loss in means.items() if loss is not None}
    if not eligible:
        raise UserError(
            f"{name} has no finite loss at any of CONFIG_LEARNING_RATES ({', '.join(means)}); fix: use lower rates "
            "under another CONFIG_STUDY_NAME"
        )
    return min(eligible, key=lambda rate: eligible[rate])


def edge(rate: str, rates: LearningRates) -> str:
    """Return the next rate beyond the lowest or the highest, if the chosen one is at that edge; else ""."""
    beside = {rates.rates[0]: rates.rates[1], rates.rates[-1]: rates.rates[-2]}.get(rate)
    if not beside or float(rate) >= 1:
        return ""
    mantissa, exponent = f"{min(1.0, float(rate) ** 2 / float(beside)):.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"

"""Step times of cost classes, measured in turns, and their ratios with intervals.

The training process measures (`measure_steps`); the study divides the time among the classes (`time_in_turns`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ra.arms import parse_arm
from referee.verdict.statistics import mean, mean_interval
from runtime import ranks
from runtime.batch_plan import WARM_UP_STEPS, BatchPlan
from study.analysis.verdict import VERDICT_SEEDS, Verdict
from study.plan_file import Plan, StepTimeRatio
from study.runs import Run

if TYPE_CHECKING:
    from gpt2.clocks import StepTimer
    from ra.variants import Variant
    from runtime.resolved_target import ResolvedTarget
    from runtime.settings import Config
    from runtime.signals import Stop


ROUNDS = 3  # turns of a process per class, where classes do not fit in memory together
BLOCKS = 10  # of consecutive turns: what an interval takes as independent
STALL = 3.0  # a longer step counts as this many medians
LEAST_TURNS = 3  # that are timed, however long they take
# An estimate is steady from this number of turns on, at this relative standard error of the mean.
STEADY_TURNS, STEADY = 20, 0.03


class DoesNotFitError(Exception):
    """The card ran out of memory at this micro-batch."""


@dataclass(frozen=True)
class Timing:
    """Timed steps of a cost class. blocks: seconds of steps, block by block. peak_bytes: of a class timed alone."""

    blocks: tuple[tuple[float, ...], ...]
    peak_bytes: int | None

    @property
    def samples(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block]


# (variants, batch, seconds to spend on each) -> Timing of each, one block, a step of each in turn in one process;
# raises DoesNotFitError
TimeSteps = Callable[[Sequence[str], BatchPlan, float], dict[str, Timing]]


def time_in_turns(
    examples: Mapping[str, str],
    batch: BatchPlan,
    seconds: float,
    time_steps: TimeSteps,
    together: bool = False,
) -> dict[str, Timing]:
    """Time each cost class in turn (A B A B), so that a drift of the machine falls on all alike.

    examples: cost class -> a variant of it. seconds: for each class. together: in one process, a step of each in turn;
    else each class has ROUNDS processes in turn. A class alone has one process.
    """
    if together and len(examples) > 1:
        by_name = time_steps([*examples.values()], batch, seconds)
        return {
            cost: Timing(_split(by_name[name].samples), by_name[name].peak_bytes)
            for cost, name in examples.items()
        }
    parts: dict[str, list[Timing]] = {cost: [] for cost in examples}
    rounds = ROUNDS if len(examples) > 1 else 1
    for _ in range(rounds):
        for cost, name in examples.items():
            parts[cost].append(time_steps([name], batch, seconds / rounds)[name])
    return {
        cost: Timing(
            tuple(tuple(part.samples) for part in timed), max(part.peak_bytes or 0 for part in timed)
        )
        for cost, timed in parts.items()
    }


def _split(samples: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """The samples in at most BLOCKS blocks of nearly the same length, in order."""
    count = min(BLOCKS, len(samples))
    ends = [len(samples) * number // count for number in range(count + 1)]
    return tuple(tuple(samples[begin:end]) for begin, end in itertools.pairwise(ends))


def is_steady(samples: Sequence[float]) -> bool:
    """Return whether the mean of the samples has a relative standard error of at most STEADY."""
    if len(samples) < STEADY_TURNS:
        return False
    return statistics.stdev(samples) <= STEADY * math.sqrt(len(samples)) * mean(samples)


def steady_mean(samples: Sequence[float]) -> float:
    """Mean seconds of a step; a stall counts as STALL medians. Slow steps count in full: a run has them as well."""
    longest = STALL * statistics.median(samples)
    return mean([min(sample, longest) for sample in samples])


def step_time_ratios(timings: Mapping[str, Timing], baseline: str) -> dict[str, StepTimeRatio]:
    """Return the ratio of each class's step time to that of class `baseline`, with a 95 % interval.

    Each block gives one log ratio: the mean log of one class's seconds minus that of the other's, stalls shortened to
    STALL medians. The interval is Student's t over the blocks; the ratio is the exponential of the mean.
    """
    logs = {cost: _block_logs(timing) for cost, timing in timings.items()}
    found = {}
    for cost in timings:
        if cost == baseline:
            continue
        each = mean_interval([own - base for own, base in zip(logs[cost], logs[baseline], strict=True)])
        low, high = (None if end is None else math.exp(end) for end in (each.low, each.high))
        found[cost] = StepTimeRatio(baseline, math.exp(each.mean), low, high)
    return found


def _block_logs(timing: Timing) -> list[float]:
    longest = STALL * statistics.median(timing.samples)
    return [mean([math.log(min(seconds, longest)) for seconds in block]) for block in timing.blocks]


def measure_steps(
    config: Config,
    resolved: ResolvedTarget,
    variants: Mapping[str, Variant],
    batch: BatchPlan,
    seconds: float,
    stop: Stop,
    timer: StepTimer,
    after_warm_up: Callable[[], None] = lambda: None,
    until_steady: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of steps on random tokens, by variant; each variant makes a step in turn.

    seconds: for each of them, on the timer. after_warm_up: called before the first timed step. until_steady: stop as
    soon as every mean is steady. Nothing waits for the device between steps; steps that it has not finished do not
    count as spent yet.
    """
    import torch

    from gpt2.training_step import Stepper

    steppers = {
        name: Stepper(
            variant.model,
            config.optimizer,
            batch,
            seed=0,
            device=resolved.device,
            dtype=resolved.dtype,
            compile=config.target.compile,
            parts=variant.parts,
            bfloat16_residual=config.target.bfloat16_residual,
        )
        for name, variant in variants.items()
    }
    shape = (batch.effective, batch.block_size + 1)
    ids_ET = torch.randint(config.model.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    ids_ET = ranks.share(ids_ET).to(resolved.device)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in steppers}
    running: deque[tuple[str, Any]] = deque()  # steps that the device has not finished
    finished: dict[str, list[float]] = {name: [] for name in steppers}

    def enough() -> bool:
        if until_steady and all(map(is_steady, finished.values())):
            return True
        return sum(map(sum, finished.values())) >= seconds * len(steppers)

    turns = 0
    while turns < WARM_UP_STEPS + LEAST_TURNS or not all(ranks.agree(enough())):
        if turns == WARM_UP_STEPS:
            after_warm_up()
        for name, stepper in steppers.items():
            ranks.together(stop.check)
            began = timer.mark()
            stepper.step(ids_ET, turns, 10**9)  # a rate near zero: the time does not depend on it
            marks[name].append((began, timer.mark()))
            if turns >= WARM_UP_STEPS:
                running.append((name, marks[name][-1]))
        turns += 1
        while running and (passed := timer.passed(*running[0][1])) is not None:
            finished[running.popleft()[0]].append(passed)
    return {name: [timer.seconds(*pair) for pair in mine[WARM_UP_STEPS:]] for name, mine in marks.items()}


# Speed as an axis of its own: step times beside the baseline's, and the difference at equal time. Needs no torch.


SETTLED = 0.9  # of a run's tokens: later evaluations are too close to the end to show a slope


@dataclass(frozen=True)
class Speed:
    """A variant's step time over that of the variants of class `to`, with its 95 % interval.

    at_equal_time: the lowest and highest estimate (nats) of the difference at equal time; None under VERDICT_SEEDS
    seeds, where an input is unknown, and in a study at equal time.
    """

    variant: str
    to: str
    ratio: float
    low: float | None
    high: float | None
    at_equal_time: tuple[float, float] | None


def speeds(plan: Plan | None, verdicts: Sequence[Verdict], ended: Sequence[Run]) -> list[Speed]:
    """Return the real changes and other variants whose step times the plan knows. ended: runs with a final loss."""
    if plan is None:
        return []
    by_variant = {verdict.variant: verdict for verdict in verdicts}
    slope = slopes([run for run in ended if parse_arm(run.variant).is_control])
    found = []
    for name in dict.fromkeys(run.variant for run in ended):
        row = plan.variants.get(name)
        timed = plan.step_time_ratios.get(row.cost_class) if row else None
        if row is None or timed is None or row.cost_class == timed.to:
            continue
        verdict = by_variant.get(name)
        enough = verdict is not None and verdict.seeds >= VERDICT_SEEDS and not plan.budget.equal_time
        expected = None
        if enough and verdict and slope and timed.low and timed.high:
            moves = [rate * math.log(ratio) for rate in slope for ratio in (timed.low, timed.high)]
            centre = verdict.test.difference.mean
            expected = (centre + min(moves), centre + max(moves))
        found.append(Speed(name, timed.to, timed.ratio, timed.low, timed.high, expected))
    return found


def slopes(runs: Sequence[Run]) -> tuple[float, float] | None:
    """Return the lowest and highest fall of the loss (nats) for each unit of ln(tokens) late in training.

    Lines from each evaluation between half and nine tenths of the tokens to the end of the run, averaged over the
    runs. None where a run has no such evaluation or its loss rises.
    """
    found = []
    for run in runs:
        end = run.record.progress.tokens
        late = {tokens: loss for tokens, loss in run.values.items() if end / 2 <= tokens <= SETTLED * end}
        found.append([(loss - run.value) / math.log(end / at) for at, loss in late.items()])
    if not found or not all(found):
        return None
    low, high = mean(list(map(min, found))), mean(list(map(max, found)))
    return (low, high) if low >= 0 else None

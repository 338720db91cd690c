"""Which modules, computed in another way, make a symptom vanish: replays of training steps with fixes (section 2.4.2).

nan      a loss, norm, parameter or gradient is not finite, or the step raises ArithmeticError
spike    a loss is far above those before it (referee.numerics.diagnose.spikes)
differs  a loss or norm differs beyond rounding from that of the right run (ReplayedStep.golden)
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from referee.errors import NumericsError, described
from referee.numerics.diagnose.spikes import LOSS, Outlier
from referee.numerics.diagnose.symptoms import pair_curves
from referee.numerics.replayed_step import ReplayedStep
from referee.numerics.search.fix_words import ADAMW, FLAGS, OFF, SGD, fix, units
from referee.verdict.loss_files import LossCurve

Item = TypeVar("Item", bound=Hashable)
Holds = Callable[[tuple[Item, ...]], bool]


def smallest_set(items: Sequence[Item], holds: Holds[Item]) -> tuple[Item, ...] | None:
    """Return a set for which `holds` is true and of which no single item can be left out; None if not for all items.

    Binary search finds the shortest prefix that holds; its last item is needed, and the search goes on within the
    prefix. Then each item is left out, which changes only the result of a predicate that more items can falsify. The
    order of the items is kept. `holds` should remember its answers.
    """
    if holds(()):
        return ()
    if not holds(tuple(items)):
        return None
    needed: list[Item] = []
    rest = list(items)

    def chosen(count: int) -> tuple[Item, ...]:
        taken = {*needed, *rest[:count]}
        return tuple(item for item in items if item in taken)

    while not holds(chosen(0)):
        # all items hold, so the last count is not asked
        count = 1 + bisect_left(range(1, len(rest)), True, key=lambda count: holds(chosen(count)))
        needed.append(rest[count - 1])
        rest = rest[: count - 1]
    return without_needless(chosen(0), holds)


def without_needless(items: tuple[Item, ...], holds: Holds[Item]) -> tuple[Item, ...]:
    """Return the items without those that `holds` does not need. It holds for `items`."""
    for item in items if len(items) > 1 else ():
        fewer = tuple(other for other in items if other != item)
        if holds(fewer):
            return without_needless(fewer, holds)
    return items


NAN, SPIKE, DIFFERS = "nan", "spike", "differs"
SYMPTOMS = (NAN, SPIKE, DIFFERS)
GONE, SHOWN = "gone", "symptom"
Progress = Callable[[str, str], None]  # (words, outcome)


@dataclass
class Bisection:
    """A search for the smallest set of fixes with which a replay lacks a symptom.

    symptom: "nan", "spike" or "differs". kinds: of fixes, in the order in which they are tried. tried: words -> GONE,
    SHOWN, or why the step fails with them.
    """

    replay: ReplayedStep
    symptom: str = NAN
    kinds: Sequence[str] = ("upcast", "small")
    progress: Progress = lambda words, outcome: None
    tried: dict[str, str] = field(default_factory=dict)

    def search(self) -> tuple[str, ...]:
        """Return the words, () where no fix of all modules suffices.

        No word can be left out; it need not be the only such set. NumericsError where a replay lacks the symptom.
        """
        if self.symptom not in SYMPTOMS:
            raise NumericsError(f"symptom {self.symptom} is unknown; fix: use {', '.join(SYMPTOMS)}")
        if self.symptom == DIFFERS and not self.replay.golden:
            raise NumericsError("there are no right losses to differ from; fix: ReplayedStep(..., golden=)")
        outcome = self.outcome("")
        if outcome != SHOWN:
            raise NumericsError(
                f"a replay does not show the symptom {self.symptom}, so there is nothing to search; fix: choose "
                "another step or symptom, or ask `repeat` whether the step is reproducible"
            )
        if ADAMW in self._updates() and self.outcome(ADAMW) == GONE:
            return (ADAMW,)
        model = self.replay.model
        parts = [*units(model), *self.replay.others]
        for kind in self.kinds:
            items = [f"{kind}:{path}" for path in parts]
            if found := smallest_set(items, self.is_gone):
                return self._refined(found)
        return ()

    def _updates(self) -> list[str]:
        """Try other updates, where more than one step is replayed. Return the words."""
        optimizer = self.replay.optimizer
        if not optimizer or self.replay.steps == 1:
            return []
        words = (
            [OFF, SGD] if self.symptom != DIFFERS else []
        )  # they lead to other losses than the right run's
        for word in words:
            self.outcome(word)
        fused = all(name in group for group in optimizer.param_groups for name in FLAGS)
        return [*words, ADAMW] if fused else words

    def is_gone(self, words: Sequence[str]) -> bool:
        return self.outcome(" ".join(words)) == GONE

    def outcome(self, words: str) -> str:
        """Replay with fixes, or take the answer of before. Return GONE, SHOWN, or an error in one line."""
        if words not in self.tried:
            self.tried[words] = self._replay(words)
        return self.tried[words]

    def _replay(self, words: str) -> str:
        try:
            outcome = SHOWN if shows(self.symptom, self.replay, *play(self.replay, words)) else GONE
        except (NumericsError, RuntimeError) as error:  # no kernel, no memory
            if not words:
                raise NumericsError(
                    f"the step fails: {described(error)}; fix: run it without numerics"
                ) from error
            outcome = described(error)
        self.progress(words, outcome)
        return outcome

    def _refined(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Replace modules by modules within them, where those suffice."""
        modules, layers = dict(self.replay.model.named_modules()), {*units(self.replay.model)}
        finer: list[str] = []
        for word in words:
            kind, _, path = word.partition(":")
            children = (
                [f"{path}.{name}" for name, _ in modules[path].named_children()] if path in modules else []
            )
            finer += [word] if {*children} <= layers else [f"{kind}:{child}" for child in children]
        if {*finer} == {*words} or not self.is_gone(finer):
            return words
        found = smallest_set(finer, self.is_gone)
        return self._refined(found) if found else words


def play(replay: ReplayedStep, words: str = "") -> tuple[LossCurve, int | None]:
    """Replay the steps with fixes, up to one that is not finite. Returns the curve, and the number of that step."""
    curve, fixes = LossCurve("replay", {}), None
    try:
        replay.restore()
        fixes = apply_fixes(replay, words) if words else None
        for number in range(replay.start + 1, replay.start + replay.steps + 1):
            try:
                returned = replay.function()
            except ArithmeticError:
                return curve, number
            values = _numbers(returned)
            if not values:
                raise NumericsError("the step returns no number; fix: return the loss")
            curve.losses[number] = values[0]
            curve.gradient_norms |= {number: values[1]} if len(values) > 1 else {}
            if not all(map(math.isfinite, values)) or not _all_finite(replay):
                return curve, number
    finally:
        if fixes is not None:
            fixes.undo()
        replay.restore()
    return curve, None


def apply_fixes(replay: ReplayedStep, words: str) -> Any:
    """Apply fixes to a replay. Returns an object with undo()."""
    if replay.fixes is not None:
        return replay.fixes(words)
    return fix(replay.model, words, optimizer=replay.optimizer, others=replay.others)


def _numbers(returned: Any) -> list[float]:
    """Return the values of the scalars and of short vectors that a step returned."""
    found: list[float] = []
    for one in tree_leaves(returned):
        if isinstance(one, Tensor) and one.numel() <= 2:
            found += one.detach().flatten().tolist()
        elif isinstance(one, (int, float)):
            found.append(float(one))
    return found


def _all_finite(replay: ReplayedStep) -> bool:
    values: list[Tensor] = [value for module in replay.modules.values() for value in module.parameters()]
    values += [value.grad for value in values if value.grad is not None]
    with torch.no_grad():
        return all(bool(value.isfinite().all()) for value in values)


def shows(symptom: str, replay: ReplayedStep, curve: LossCurve, failed: int | None) -> bool:
    """Whether replayed steps show a symptom. A step that is not finite is a spike and a difference, too."""
    if failed is not None:
        return True
    if symptom == SPIKE:
        outlier = Outlier(LOSS, values=replay.before)
        return any(outlier.observe(loss) is not None for loss in curve.losses.values())
    if symptom == DIFFERS and replay.golden:
        with contextlib.suppress(NumericsError):  # no common step
            return pair_curves(curve, replay.golden, replay.epsilon).beyond is not None
    return False

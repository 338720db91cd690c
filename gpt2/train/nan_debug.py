"""Where NaN or infinity came from: the step made once more, one module at a time, nothing applied.

The weights are those of the failed step, since the optimizer was not applied; dropout is a function of (seed,
iteration). So the step can be repeated, and what does not come back on repeating was not computed: it happened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model.loss import linear_cross_entropy
from gpt2.train.step import NotFiniteError, Stepper

MOST_RETRIED = 3  # faults of one run that are tried again


@dataclass(frozen=True)
class NotFinite:
    """The first value that is not finite.

    what: "weight", "output", "loss", "gradient", or "nothing" where repeating the step gave finite values only.
    name: of the module (output, gradient of its output) or the parameter; empty for the loss and for nothing.
    micro_batch: its number in the effective batch; None for a weight and for nothing.
    """

    what: str
    name: str = ""
    micro_batch: int | None = None

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f" in micro-batch {self.micro_batch}"
        if self.what == "nothing":
            return "the same step, made again, is finite everywhere"
        if self.what == "loss":
            return f"the first tensor that is not finite is the loss{where}"
        of = "" if self.what == "weight" else "of "
        return f"the first tensor that is not finite is the {self.what} {of}{self.name}{where}"


def first_not_finite(stepper: Stepper, ids_ET: Tensor, iteration: int) -> NotFinite:
    """Repeat step `iteration` on ids_ET (E, T+1) without compiling and say where it first goes wrong.

    In the order of the computation: weights, then for each micro-batch outputs of modules, the loss, gradients of
    outputs from the last module to the first, gradients of weights. Gradients are cleared before and after.
    """
    stepper.optimizer.zero_grad(set_to_none=True)
    for name, parameter in stepper.model.named_parameters():
        if not _finite(parameter):
            return NotFinite("weight", name)
    try:
        stepper.seed_dropout(iteration)
        for number, micro_ids in enumerate(ids_ET.split(stepper.batch.micro)):
            found = _repeat(stepper, micro_ids, number)
            if found:
                return found
    finally:
        stepper.optimizer.zero_grad(set_to_none=True)
    return NotFinite("nothing")


def _repeat(stepper: Stepper, micro_ids: Tensor, number: int) -> NotFinite | None:
    model, found = stepper.model, _Found()
    handles = [
        module.register_forward_hook(found.watch(name)) for name, module in model.named_modules() if name
    ]
    try:
        with stepper.autocast():
            hidden = model.hidden(micro_ids[:, :-1])
            loss = linear_cross_entropy(hidden, model.head, micro_ids[:, 1:], model.vocabulary)
        if found.first:
            return NotFinite("output", found.first, number)
        if not _finite(loss):
            return NotFinite("loss", "", number)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    if found.first:
        return NotFinite("gradient", found.first, number)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return NotFinite("gradient", name, number)
    return None


class _Found:
    """Remembers the first module whose output, or else whose output's gradient, is not finite."""

    def __init__(self) -> None:
        self.first = ""

    def watch(self, name: str) -> Any:
        def look(value: Tensor) -> None:
            if not self.first and not _finite(value):
                self.first = name

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                look(output.detach())
                if output.requires_grad:
                    output.register_hook(look)

        return hook


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


class FaultLog:
    """The steps of a run that were not finite: the record's `faults`.

    repeated: None while a fault has not been tried again from the checkpoint, then whether it came back. Each fault is
    tried again once, the first MOST_RETRIED of a run without being asked to, so that no run goes round for ever.
    """

    def __init__(self, faults: Sequence[dict[str, Any]] = ()) -> None:
        self.faults = list(faults)

    def explain(
        self, error: NotFiniteError, stepper: Stepper, ids_ET: Tensor, iteration: int, sequences: list[int]
    ) -> NotFiniteError:
        """The error with where it began and whether it came before. sequences: the window numbers of ids_ET."""
        found = first_not_finite(stepper, ids_ET, iteration)
        again = [
            fault
            for fault in self.faults
            if fault["iteration"] == iteration and fault["repeated"] is not False
        ]
        micro, own = stepper.batch.micro, []
        if found.micro_batch is not None:
            own = sequences[found.micro_batch * micro : (found.micro_batch + 1) * micro]
        for fault in again:
            fault["repeated"] = True
        if not again:
            self.faults.append(
                {"iteration": iteration, **dataclasses.asdict(found), "sequences": own, "repeated": None}
            )
        told = f"{error}; {found}" + (f", sequences {own} of the training data" if own else "")
        if again:
            told += "; the same iteration failed before, from the same checkpoint: it is repeatable"
        retry = not again and len(self.faults) <= MOST_RETRIED
        if not again and not retry:
            told += f"; not tried again at once, after {len(self.faults) - 1} others in this run"
        return NotFiniteError(told, retry=retry)

    def passed(self, iterations: int) -> None:
        """After so many iterations: what was not finite once and is now did not come back."""
        for fault in self.faults:
            if fault["repeated"] is None and fault["iteration"] < iterations:
                fault["repeated"] = False

    def told(self) -> list[str]:
        """At the end of the run, when every fault has been passed: a sentence for each."""
        return [
            f"iteration {fault['iteration']} was not finite {'several times' if fault['repeated'] else 'once'} "
            f"({' '.join(part for part in (fault['what'], fault['name']) if part)}), and finite when made again from "
            "the checkpoint: a passing fault, not the data's or the model's"
            for fault in self.faults
        ]

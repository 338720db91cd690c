"""Find the source of NaN or infinity: repeat the step module by module, without applying the optimizer.

The weights are those of the failed step, since the optimizer was not applied, and dropout is a function of (seed,
iteration). So the step is repeatable, and a fault that does not recur was transient: not computed from the data.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpt2.training_step import NotFiniteError, Stepper
from runtime import ranks
from runtime.errors import source_line
from runtime.run_record import Fault

MAX_RETRIES = 3  # of one run's faults


@dataclass(frozen=True)
class NotFinite:
    """The first value that is not finite.

    what: "weight", "output", "loss", "gradient", or "nothing" if the repeated step is finite.
    name: the module (output, gradient of its output) or the parameter; empty for "loss" and "nothing".
    micro_batch: its number in the effective batch; None for "weight" and "nothing".
    source: file:line of the method that computes the output, where a class outside gpt2 and torch defines it.
    """

    what: Literal["weight", "output", "loss", "gradient", "nothing"]
    name: str = ""
    micro_batch: int | None = None
    source: str = ""

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f" in micro-batch {self.micro_batch}"
        if self.what == "nothing":
            return "the repeated step is finite everywhere"
        if self.what == "loss":
            return f"the first non-finite tensor is the loss{where}"
        of = "" if self.what == "weight" else "of "
        source = f" ({self.source})" if self.source else ""
        return f"the first non-finite tensor is the {self.what} {of}{self.name}{source}{where}"


def first_not_finite(stepper: Stepper, ids_ET: Tensor, iteration: int) -> NotFinite:
    """Repeat step `iteration` on ids_ET (E, T+1) without compiling and return its first non-finite value.

    Order of the search: weights; then for each micro-batch the outputs of modules, the loss, gradients of outputs from
    the last module to the first, gradients of weights. Gradients are cleared before and after.
    """
    stepper.optimizer.zero_grad(set_to_none=True)
    for name, parameter in stepper.model.named_parameters():
        if not _finite(parameter):
            return NotFinite("weight", name)
    try:
        micro_batches = ids_ET.split(stepper.batch.micro)
        for number, micro_ids in enumerate(micro_batches, ranks.rank() * len(micro_batches)):
            stepper.seed_dropout(iteration, number)
            found = _repeat(stepper, micro_ids, number)
            if found:
                return found
    finally:
        stepper.optimizer.zero_grad(set_to_none=True)
    return NotFinite("nothing")


def _repeat(stepper: Stepper, micro_ids: Tensor, number: int) -> NotFinite | None:
    model = stepper.model
    faults: list[
        str
    ] = []  # modules whose output, or gradient of it, is not finite, in the order of the computation

    def check(name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not _finite(value.detach()):
            faults.append(name)

    def watch_output(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        check(name, output)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(functools.partial(check, name))

    def watch_input(outside: str, module: nn.Module, inputs: Any) -> None:
        """The input of a module is computed by the module that contains it, between its parts."""
        if outside and inputs:
            check(outside, inputs[0])

    def attend(name: str, method: Any, *arguments: Any) -> Any:
        """No module's hook sees the result of `attend`."""
        output = method(*arguments)
        check(f"{name}.attend", output)
        return output

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if not name:
                continue
            outside = name.rpartition(".")[0]
            hook = module.register_forward_hook(functools.partial(watch_output, name))
            stack.callback(hook.remove)
            before = module.register_forward_pre_hook(functools.partial(watch_input, outside))
            stack.callback(before.remove)
            if hasattr(module, "attend"):
                vars(module)["attend"] = functools.partial(attend, name, module.attend)
                stack.callback(vars(module).pop, "attend")
        loss = stepper.loss_of(micro_ids, eager=True)
        if faults:
            return NotFinite("output", faults[0], number, _source(model, faults[0]))
        if not _finite(loss):
            return NotFinite("loss", "", number)
        loss.backward()
    if faults:
        return NotFinite("gradient", faults[0], number, _source(model, faults[0]))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return NotFinite("gradient", name, number)
    return None


def _source(model: nn.Module, name: str) -> str:
    """file:line of the named module's method; "" where gpt2 or torch defines it."""
    method = name.endswith(".attend")
    found = source_line(
        model.get_submodule(name.removesuffix(".attend")), ("attend",) if method else ("forward",)
    )
    return f"{found[0]}:{found[1]}" if found else ""


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


class FaultLog:
    """The non-finite steps of a run: `faults` of its record.

    Each fault is retried once from the checkpoint; the first MAX_RETRIES of a run without a new command, so that no run
    loops for ever. Fault.repeated: None before the retry, then whether the fault recurred.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = list(faults)

    def explain(
        self, error: NotFiniteError, stepper: Stepper, ids_ET: Tensor, iteration: int, sequences: list[int]
    ) -> NotFiniteError:
        """Return the error with its source and whether it recurred. sequences: the window numbers of the batch.

        Of several ranks, each repeats its share ids_ET of the batch; the first fault in the order of the batch counts.
        """
        each = ranks.gather(first_not_finite(stepper, ids_ET, iteration))
        found = next((one for one in each if one.what != "nothing"), each[0])
        micro, involved = stepper.batch.micro, []
        if found.micro_batch is not None:
            involved = sequences[found.micro_batch * micro : (found.micro_batch + 1) * micro]
        text = f"{error}"
        if found.source:
            text = text.partition("; fix: ")[0]
        message = f"{text}; {found}" + (f", sequences {involved} of the training data" if involved else "")
        if found.source:
            message += (
                f"; fix: keep {found.source} finite for large inputs (make admit examines it), or set a smaller "
                "CONFIG_LEARNING_RATE"
            )
        for number, fault in enumerate(self.faults):
            if fault.iteration == iteration and fault.repeated is not False:
                self.faults[number] = fault.replace(repeated=True)
                message += (
                    "; the iteration failed before from the same checkpoint, so the fault is repeatable"
                )
                return NotFiniteError(message)
        self.faults.append(
            Fault(iteration, found.what, found.name, found.micro_batch, tuple(involved), repeated=None)
        )
        if len(self.faults) <= MAX_RETRIES:
            return NotFiniteError(message, retry=True)
        others = len(self.faults) - 1
        return NotFiniteError(f"{message}; not retried automatically after {others} other faults in this run")

    def passed(self, iterations: int) -> None:
        """Mark faults before `iterations` that were not retried yet: the retry was finite."""
        self.faults = [
            fault.replace(repeated=False)
            if fault.repeated is None and fault.iteration < iterations
            else fault
            for fault in self.faults
        ]

    def messages(self) -> list[str]:
        """Return one sentence per fault, at the end of a run: every fault is transient by then."""
        return [
            f"iteration {fault.iteration} was not finite {'several times' if fault.repeated else 'once'} "
            f"({' '.join(part for part in (fault.what, fault.name) if part)}), and finite when repeated from the "
            "checkpoint: a transient fault, not caused by the data or the model"
            for fault in self.faults
        ]

"""Inject a fault into a training process. Python imports this file at its start where PYTHONPATH has the folder.

FAULT is JSON: place ("step", "forward", "loss", "accumulation", "evaluate", "hellaswag", "save", "compile"); at, the
iteration from which it fires, or only, the one at which it does; action ("TERM", "INT", "HUP": that signal to
the study; "kill": SIGKILL to the training process; "kill-both"; "oom"; "nan"; "spike": thrice the loss);
times (how often, counted over all processes; 0: always); above (for "oom": only where the micro-batch, or
the scored batch, is larger); stuck (seconds that the step then hangs); rank (the only one of several ranks where it
fires). At the place "start", the actions "torch" and "data" give a rank another version of torch and other data.
STEP_SECONDS makes every step take that much longer, so that a study of a very small model lasts long enough.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FIRED = Path("fault-fired")


class Fault:
    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted, self.iteration = wanted, 0

    def strikes(self, place: str, size: int = 0) -> str:
        """Return the action that is due now, or an empty string."""
        wanted, rank = self.wanted, os.environ.get("RANK", "")
        if (
            wanted.get("place") != place
            or str(wanted.get("rank", rank)) != rank
            or self.iteration < wanted.get("at", 0)
            or size <= wanted.get("above", -1)
        ):
            return ""
        if "only" in wanted and self.iteration != wanted["only"]:
            return ""
        fired = len(FIRED.read_text()) if FIRED.exists() else 0
        if wanted.get("times", 1) and fired >= wanted.get("times", 1):
            return ""
        FIRED.write_text("x" * (fired + 1))
        return str(wanted["action"])

    def strike(self, place: str, size: int = 0) -> None:
        action = self.strikes(place, size)
        if action == "oom":
            import torch

            raise torch.OutOfMemoryError(f"injected in {place}")
        for name in action.split():
            if name in ("TERM", "INT", "HUP"):
                os.kill(os.getppid(), signal.Signals[f"SIG{name}"])
                time.sleep(0.1)
        if action.split()[:1] in (["TERM"], ["INT"], ["HUP"]):
            time.sleep(0.5 + self.wanted.get("stuck", 0))  # until the study has passed it on
        if action == "kill-both":
            os.kill(os.getppid(), signal.SIGKILL)
        if action in ("kill", "kill-both"):
            os.kill(os.getpid(), signal.SIGKILL)


def install(fault: Fault, slower: float) -> None:
    """Patch the code of the training process at the places of the fault."""
    sys.path.insert(0, os.getcwd())
    import torch

    from gpt2 import dataset, evaluator
    from gpt2 import training_step as step
    from runtime import checkpoint

    plain_step, plain_loss, plain_flush = step.Stepper.step, step.linear_cross_entropy, checkpoint._flush
    plain_perplexity, plain_hellaswag = evaluator.validation.perplexity, evaluator.hellaswag.score
    calls = [0]

    def made_step(self: Any, ids: Any, iteration: int, *rest: Any) -> Any:
        fault.iteration, calls[0] = iteration, 0
        time.sleep(slower)
        fault.strike("step", self.batch.micro)
        return plain_step(self, ids, iteration, *rest)

    def made_loss(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        fault.strike("forward", arguments[0].shape[0])
        if calls[0] == 2:
            fault.strike("accumulation")
        loss = plain_loss(*arguments, **options)
        return loss * {"nan": float("nan"), "spike": 3.0}.get(fault.strikes("loss"), 1.0)

    def made_flush(path: Path) -> None:
        fault.strike("save")
        plain_flush(path)

    def looking(place: str, size: int, stop: Any) -> Any:
        def look() -> None:
            fault.strike(place, size)
            stop()

        return look

    def made_perplexity(model: Any, windows: Any, batch: int, *rest: Any, stop: Any) -> Any:
        return plain_perplexity(model, windows, batch, *rest, stop=looking("evaluate", batch, stop))

    def made_hellaswag(*arguments: Any, stop: Any, batch_tokens: int, **options: Any) -> Any:
        look = looking("hellaswag", batch_tokens, stop)
        return plain_hellaswag(*arguments, stop=look, batch_tokens=batch_tokens, **options)

    if fault.wanted.get("place") == "compile":  # the compiler calls its backend once it has traced the model
        from torch._inductor.compile_fx import compile_fx

        plain_compile = torch.compile

        def made_compile(function: Any) -> Any:
            def backend(graph: Any, inputs: Any) -> Any:
                fault.strike("compile")
                return compile_fx(graph, inputs)

            return plain_compile(function, backend=backend)

        torch.compile = made_compile  # type: ignore[assignment]

    action = fault.strikes("start")
    if action == "torch":
        torch.__version__ = "2.0.0"  # type: ignore[assignment]
    if action == "data":
        plain_open = dataset.open_corpus
        dataset.open_corpus = lambda folder: dataclasses.replace(plain_open(folder), fingerprint="0" * 64)
    step.Stepper.step, step.linear_cross_entropy = made_step, made_loss  # type: ignore[method-assign, assignment]
    checkpoint._flush = made_flush
    evaluator.validation.perplexity, evaluator.hellaswag.score = made_perplexity, made_hellaswag
    torch.manual_seed(0)


if "scripts.train" in sys.orig_argv and any(word.endswith("plan.json") for word in sys.orig_argv):
    install(Fault(json.loads(os.environ.get("FAULT", "{}"))), float(os.environ.get("STEP_SECONDS", "0")))

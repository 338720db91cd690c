"""Very small runs over several ranks: python -m tests.gpt2.rank_runs JSON.

JSON has the runs of each number of ranks, made one after another: {"2": [{"directory", "texts", "name", "dropout",
"monitor", "then"}]}. monitor: everything, every step.
The ranks are forked from one process that has loaded torch and computed nothing, since loading it takes longer than
the runs.
The numbers of every rank go to <directory>/rank<r>.json. `then`: "oom", "nan" or "stop" disturbs rank 1 at iteration 3;
"data" gives it other data.
"""

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer loads it

from gpt2.trainer import TrainingRun
from gpt2.training_step import Stepper
from ra.admission.batches import examine_trained
from ra.variants import variant
from runtime import ranks
from runtime.batch_plan import plan_batch
from runtime.ranks import free_port
from runtime.settings import Config, EvalSet, MonitorSettings
from runtime.signals import Stop
from tests import small_runs

ITERATIONS, EFFECTIVE, MICRO = 6, 16, 2
HELLASWAG = Path(__file__).parents[1] / "fixtures" / "hellaswag_small.jsonl"


def configuration(texts: Path, dropout: float = 0.0) -> Config:
    config = small_runs.configuration(texts, ITERATIONS, dropout=dropout)
    held_out = (EvalSet("stories", str(texts / "0*.txt")),)
    return dataclasses.replace(
        config,
        evaluation=dataclasses.replace(
            config.evaluation,
            tokens=480,
            interval_tokens=512,
            hellaswag=True,
            hellaswag_limit=7,
            sets=held_out,
        ),
        checkpoint_seconds=1,
    )


def start(spec: dict[str, Any], simulated: int = 1) -> TrainingRun:
    """Start or resume the run, of as many ranks as there are. simulated: ranks of a replay in one process."""
    config = configuration(Path(spec["texts"]), spec.get("dropout", 0.0))
    run = small_runs.start(Path(spec["directory"]), config, spec.get("name", "B"), Stop())
    batch = plan_batch(EFFECTIVE, MICRO, max(ranks.world(), simulated), 16)
    plan = run.plan.replace(batch=batch, hellaswag=HELLASWAG)
    chosen = variant(spec.get("name", "B"), config.model, small_runs.ALTERNATION)
    own = run.config
    if spec.get("monitor"):
        own = dataclasses.replace(
            own, monitor=MonitorSettings(True, 1, ("all",), ("nan", "spike", "grad_norm"))
        )
    started = TrainingRun(run.directory, plan, own, run.resolved, chosen.parts, run.stop)
    started.examine = examine_trained
    started.stepper.simulated_ranks = simulated
    return started


def disturb(run: TrainingRun, action: str) -> None:
    """Disturb this rank."""
    plain = Stepper.step
    if action == "data":
        run.log.record["fingerprint"]["data"] = "another"

    def step(stepper: Stepper, ids_ET: Any, iteration: int, *rest: Any) -> Any:
        if iteration == 3:
            if action == "oom":

                def fail(*arguments: Any) -> Any:
                    raise torch.OutOfMemoryError("injected")

                stepper.loss = fail
            elif action == "nan":
                layer = stepper.model.blocks[1].mlp.fc
                layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
            elif action == "stop":
                run.stop.requested = "SIGTERM"
        return plain(stepper, ids_ET, iteration, *rest)

    run.stepper.step = step.__get__(run.stepper)  # type: ignore[method-assign]


def main() -> int:
    """Make the runs of the argument; return 1 if a rank failed."""
    return max(max(fork(int(world), specs)) for world, specs in json.loads(sys.argv[1]).items())


def fork(world: int, specs: list[dict[str, Any]]) -> list[int]:
    """Make the runs in `world` forked processes; return their exit statuses."""
    port, children = free_port(), []
    for rank in range(world):
        child = os.fork()
        if not child:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ |= {name: str(value) for name, value in numbers.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            status = 1
            try:
                make_runs(specs)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    return [abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children]


def make_runs(specs: list[dict[str, Any]]) -> None:
    """Make the runs as one of several ranks."""
    torch.set_num_threads(1)
    ranks.join("cpu", 60)
    for spec in specs:
        run = start(spec)
        found: dict[str, Any] = {"error": None}
        if ranks.rank() == 1:
            disturb(run, spec.get("then", ""))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            try:
                found["status"] = run.train()
            except Exception as error:
                found |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        weights = sum(p.double().sum().item() * k for k, p in enumerate(run.stepper.model.parameters(), 1))
        found |= {
            "iteration": run.iteration,
            "weights": weights,
            "faults": [f.to_json() for f in run.faults.faults],
        }
        (Path(spec["directory"]) / f"rank{ranks.rank()}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    sys.exit(main())

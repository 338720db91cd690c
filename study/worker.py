"""Train one run, or time its steps for the plan, in a separate process. Events go to standard output."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from runtime import attention_kernels, ranks, records, run_record
from runtime.batch_plan import plan_batch, plan_for
from runtime.dotconfig import read_symbols
from runtime.errors import UserError, disk_full, explain_full_disk, explain_missing_compiler, out_of_memory
from runtime.metrics_log import print_event
from runtime.ranks import end_like, launch
from runtime.records import parse, to_plain
from runtime.resolved_target import ResolvedTarget, resolve
from runtime.run_plan import RunPlan, Start
from runtime.settings import Config, TargetConfig
from runtime.signals import Interrupted, Stop
from study import plan_file
from study.executors import claims
from study.executors.child_process import (
    EXIT_CLAIMED,
    EXIT_DISK_FULL,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    PLACE,
)
from study.executors.claims import ClaimedError
from study.hellaswag_scores import ItemsFile
from study.plan_file import Plan
from study.runs import read_record
from study.study_settings import StudySettings

# modules that import torch are imported where they are used: the process handles signals before


def main() -> int:
    """Execute the command line. The exit status is one of study.executors.child_process."""
    parser = argparse.ArgumentParser(prog="scripts.train")
    parser.add_argument("study_dir", type=Path)
    parser.add_argument("variant")
    parser.add_argument("seed", type=int)
    parser.add_argument("--time", type=float, default=0.0, help="seconds of steps to time for each variant")
    parser.add_argument("--resolve", action="store_true", help="print the device of this machine only")
    parser.add_argument("--count", default="", help="a CountRequest: count the study's arms only")
    parser.add_argument("--inspect", action="store_true", help="create the attention maps of the report only")
    parser.add_argument("--micro", type=int, default=0)
    parser.add_argument("--beside", nargs="+", default=[], help="variants to time in turn with the first")
    parser.add_argument(
        "--parent", type=int, default=0, help="process of the study; the run stops where it ends"
    )
    arguments = parser.parse_args()
    stop = Stop().install(arguments.parent)
    try:
        stop.check()
        if arguments.resolve or arguments.count or arguments.inspect:
            print_event({"event": "answer", "answer": _answer(arguments)})
            return EXIT_FINISHED
        if count := _ranks_to_start(arguments.study_dir):
            stop.at_once = False  # the ranks are asked to stop
            return end_like(launch(count, _rank_command(), stop))
        return _work(arguments, stop)
    except Interrupted:
        return EXIT_INTERRUPTED
    except ClaimedError as holder:
        print(f"error: {holder} executes this run", file=sys.stderr)
        return EXIT_CLAIMED
    except (Exception, SystemExit) as error:  # a custom variant may call sys.exit()
        return _explain(error, arguments.study_dir)


def _ranks_to_start(study_dir: Path) -> int:
    """Return the number of processes that the run needs beside this one; 0 where it is one of them, or alone."""
    count = TargetConfig.from_symbols(read_symbols(study_dir / "config")).ranks
    return count if count > 1 and not ranks.started() else 0


def _rank_command() -> list[str]:
    """Return the command of a rank: that of this process, which is its parent."""
    words = sys.argv[1:]
    if "--parent" in words:
        at = words.index("--parent")
        words = [*words[:at], *words[at + 2 :]]
    return [sys.executable, "-m", "scripts.train", *words, "--parent", str(os.getpid())]


def _explain(error: BaseException, folder: Path) -> int:
    """Write the error as the last line of the log; return its exit status."""
    from gpt2.training_step import NotFiniteError

    status, text = EXIT_FAILED, f"{error}"
    if out_of_memory(error):
        status, text = EXIT_OUT_OF_MEMORY, f"out of memory: {error}"
    elif number := disk_full(error):
        status, text = EXIT_DISK_FULL, "; fix: ".join(explain_full_disk(number, folder))
    elif isinstance(error, NotFiniteError) and error.retry:
        status = EXIT_NOT_FINITE
    elif isinstance(error, ranks.RankLostError):
        status = ranks.EXIT_RANK_LOST
    elif not isinstance(error, UserError):
        traceback.print_exc()
        text = explain_missing_compiler(error) or f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # the log may be on the full disk
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return status


def _answer(arguments: argparse.Namespace) -> Any:
    """Return the device of this machine, the counted arms of the study, or why attention maps are missing."""
    symbols = read_symbols(arguments.study_dir / "config")
    config = plan_file.read_config(symbols, arguments.study_dir)
    if arguments.resolve:
        return to_plain(resolve(config.target))
    if arguments.inspect:
        from study.evaluation.loaded_runs import inspect_study

        return {"reasons": inspect_study(arguments.study_dir)}
    from ra.variants import variant
    from study.planner import CountRequest, count_arms
    from study.preconditions import refuse_unknown_names

    settings = StudySettings.from_symbols(symbols)
    request = parse(CountRequest, json.loads(arguments.count), "request")
    variants = {name: variant(name, config.model, config.alternation) for name in settings.variants}
    refuse_unknown_names(config, variants, request.resolved.device_type)
    return to_plain(
        count_arms(config, settings, request.resolved, variants, request.existing, request.copies)
    )


def _work(arguments: argparse.Namespace, stop: Stop) -> int:
    import torch

    from gpt2.trainer import TrainingRun
    from ra.admission.batches import examine_trained
    from ra.global_state import GlobalState
    from ra.variants import variant
    from study.planning.micro_batch import free_bytes, require_free

    symbols = read_symbols(arguments.study_dir / "config")
    config = plan_file.read_config(symbols, arguments.study_dir)
    resolved = attention_kernels.prepare_device(config.target, config.model)
    ranks.join(resolved.device_type, config.target.ranks_timeout_seconds)
    with attention_kernels.attention_context(resolved, config.model.dropout):
        if arguments.time:
            return _time_steps(arguments, config, resolved, stop)
        refuse_another_card(arguments.study_dir, resolved)
        run = run_plan(arguments.study_dir, arguments.variant, arguments.seed)
        here = ranks.local("LOCAL_WORLD_SIZE", 1) if resolved.device_type == "cpu" else 1
        require_free(
            resolved, run.predicted_bytes and run.predicted_bytes * here, free_bytes(resolved.device)
        )
        chosen = variant(arguments.variant, config.model, config.alternation)
        own = chosen.configure(config)
        with contextlib.ExitStack() as stack:
            holder = {}
            if ranks.first():  # it writes
                place = os.environ.get(PLACE, "")
                holder["fence"] = stack.enter_context(claims.claimed(run.directory, place)).check
            # no rank reads a checkpoint before the first has the claim
            record = read_record(run.directory) if ranks.first() else None
            (finished,) = ranks.agree(record is not None and record.status == "finished")
            status = "finished"
            if not finished:  # of a job that waited while another process finished the run
                training = TrainingRun(run, own, resolved, chosen.parts, stop, config, **holder)
                with training.stepper.autocast(), torch.no_grad():  # as in the examination at the end
                    before = GlobalState(generators=False)
                training.examine = functools.partial(examine_trained, before=before)
                status = training.train()
        ranks.leave()
    return EXIT_FINISHED if status == "finished" else EXIT_INTERRUPTED


def refuse_another_card(study_dir: Path, resolved: ResolvedTarget) -> None:
    """UserError if a cluster placed this run on another kind of card than that of the plan."""
    plan = plan_file.read(study_dir)
    on_cluster = os.environ.get(PLACE, "").startswith(("slurm", "ray"))
    if not on_cluster or plan is None or plan.target is None:
        return
    planned = (plan.target.device, plan.target.dtype)
    if planned != (resolved.device_name, resolved.dtype):
        raise UserError(
            f"this node has {resolved.device_name}, {resolved.dtype}, and the study was planned on "
            f"{', '.join(map(str, planned))}: a study has one kind of card; fix: request that kind, such as "
            'CONFIG_SLURM_OPTIONS="--gres=gpu:a100:1", or set another CONFIG_STUDY_NAME'
        )


def run_plan(study_dir: Path, variant: str, seed: int) -> RunPlan:
    """Return the plan of one run from the study's plan.json."""
    plan = plan_file.read(study_dir)
    if plan is None:
        raise UserError(f"{study_dir} has no plan.json; fix: start the study with `make`")
    row, name = plan.variants[variant], run_record.run_name(variant, seed)
    return RunPlan(
        directory=study_dir / "runs" / name,
        run=name,
        variant=variant,
        seed=seed,
        iterations=row.iterations,
        batch=plan_for(plan.batch, ranks.world()),
        predicted_bytes=row.predicted_bytes,
        hellaswag=hellaswag_source(study_dir),
        warmup_iterations=row.warmup_iterations,
        continues=_start(plan, variant, name),
    )


def _start(plan: Plan, variant: str, run: str) -> Start | None:
    """Return the run of the shorter study that a run continues; None without such a study."""
    shorter = plan.continues
    if shorter is None:
        return None
    return Start(Path(shorter.study) / "runs" / run, shorter.iterations[variant], shorter.schedule)


def hellaswag_source(study_dir: Path) -> Path | str:
    """Return the file of HellaSwag's items, or the reason why the study has none."""
    found = records.read(ItemsFile, study_dir / "hellaswag.json")
    return Path(found.path) if found.path else found.absent or "not prepared"


def _time_steps(
    arguments: argparse.Namespace,
    config: Config,
    resolved: ResolvedTarget,
    stop: Stop,
) -> int:
    """Time steps of the variants in turn; print {"event": "timing", "seconds": {name: [...]}, "peak_bytes": N}."""
    import torch

    from gpt2.clocks import step_timer
    from gpt2.measured_memory import PeakMeter
    from ra.variants import variant
    from study.planning.micro_batch import Predictions, free_bytes, require_free
    from study.step_timing import measure_steps

    batch = plan_batch(config.batch.effective, arguments.micro, ranks.world(), config.model.block_size)
    timed = {
        name: variant(name, config.model, config.alternation)
        for name in (arguments.variant, *arguments.beside)
    }
    if resolved.device != "cpu":
        need = Predictions(config, resolved).peak_bytes(timed[arguments.variant], batch.micro)
        require_free(resolved, need, free_bytes(resolved.device))
    meter = PeakMeter(resolved.device)
    timer = step_timer(resolved.device, torch.get_num_threads(), ranks.world())
    seconds = measure_steps(
        config, resolved, timed, batch, arguments.time, stop, timer, meter.restart,
        until_steady=not config.budget.max_time_seconds,  # with a count, step times serve estimates alone
    )  # fmt: skip
    if ranks.first():
        print_event({"event": "timing", "seconds": seconds, "peak_bytes": meter.peaks()["allocated"]})
    ranks.leave()
    return EXIT_FINISHED

"""Train the run of a plan, or answer a question of the study, in a separate process; exit.json says how it ended."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import attention_kernels, ranks, records, run_plan
from runtime.attempt import PLACE, Fence
from runtime.batch_plan import plan_batch, plan_for
from runtime.errors import UserError, disk_full, explain_full_disk, explain_missing_compiler, out_of_memory
from runtime.ranks import end_like, launch
from runtime.records import to_plain
from runtime.resolved_target import ResolvedTarget, export_environment, resolve
from runtime.run_plan import RunPlan
from runtime.run_record import RecordedTarget
from runtime.settings import Config
from runtime.signals import Interrupted, Stop
from study.executors.child_process import (
    EXIT_DISK_FULL,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
)
from study.executors.executor import read_exit, write_exit
from study.runs import module, read_record
from study.trackers import followed_by_trackers

if TYPE_CHECKING:
    from study.planner import Question, Steps

COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# modules that import torch are imported where they are used: the process handles signals before


def main() -> int:
    """Execute the command line. The exit status is one of study.executors.child_process."""
    parser = argparse.ArgumentParser(prog="scripts.train")
    parser.add_argument("plan", type=Path, help="plan.json of a run, or the file of a question of the study")
    parser.add_argument(
        "--parent", type=int, default=0, help="process of the study; the run stops where it ends"
    )
    given = parser.parse_args()
    status, answer = _execute(given.plan, given.parent)
    if status != EXIT_FINISHED or not ranks.started() or ranks.local("RANK", 0) == 0:
        with contextlib.suppress(OSError):  # the disk may be full, or the folder gone
            write_exit(given.plan.parent, status, answer)
    return status


def _execute(path: Path, parent: int) -> tuple[int, Any]:
    """Return the exit status, and the answer to a question."""
    stop = Stop().install(parent)
    try:
        stop.check()
        if path.name == run_plan.FILE:
            work: RunPlan | Question = run_plan.load(path)
            steps = True
        else:
            from study.planner import Question, Steps  # loads scipy, which a run does not need

            work = records.read(Question, path)
            steps = isinstance(work.asked, Steps)
        target = work.settings.target
        if on_cluster():  # a node reuses what another one compiled
            study_dir = path.absolute().parents[2 if isinstance(work, RunPlan) else 1]
            os.environ.setdefault(COMPILER_CACHE, str(study_dir / "compiled"))
        export_environment(target.name, deterministic=target.deterministic, launched=True)
        if steps and target.ranks > 1 and not ranks.started():
            stop.at_once = False  # the ranks are asked to stop
            command = [sys.executable, "-m", "scripts.train", str(path), "--parent", str(os.getpid())]
            status = end_like(launch(target.ranks, command, stop))
            return status, read_exit(path.parent).get("answer")  # of the first rank
        if isinstance(work, RunPlan):
            return _train(path.parent, work, stop), None
        answer = _answer(work, stop)
        ranks.leave()
        return EXIT_FINISHED, answer
    except Interrupted:
        return EXIT_INTERRUPTED, None
    except (Exception, SystemExit) as error:  # a custom variant may call sys.exit()
        return _explain(error, path.parent), None


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


def _join(settings: Config) -> ResolvedTarget:
    """Prepare the device, and join the other ranks of a run of several."""
    resolved = attention_kernels.prepare_device(settings.target, settings.model)
    ranks.join(resolved.device_type, settings.target.ranks_timeout_seconds)
    return resolved


def _train(run_dir: Path, plan: RunPlan, stop: Stop) -> int:
    """Train the run in its folder, or continue it from its last checkpoint."""
    from study.planning.micro_batch import free_bytes, require_free

    if plan.task == "grpo":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several cards, TRL would use all
    resolved = _join(plan.settings)
    refuse_another_card(plan.target, resolved)
    plan = plan.replace(batch=plan_for(plan.batch, ranks.world()))
    here = ranks.local("LOCAL_WORLD_SIZE", 1) if resolved.device_type == "cpu" else 1
    require_free(resolved, plan.predicted_bytes and plan.predicted_bytes * here, free_bytes(resolved.device))
    with followed_by_trackers(run_dir, plan.settings.tracking):
        fence = Fence(run_dir).check if ranks.first() else lambda: None  # the first rank writes
        # no rank reads a checkpoint before the first has taken the run over
        record = read_record(run_dir) if ranks.first() else None
        (finished,) = ranks.agree(record is not None and record.status == "finished")
        status = "finished"
        if not finished:  # of a job that waited while another process finished the run
            if plan.task == "grpo":
                status = module("grpo.train").GrpoRun(run_dir, plan, resolved, stop, fence=fence).run()
            else:
                status = _gpt2(run_dir, plan, resolved, stop, fence=fence)
    ranks.leave()
    return EXIT_FINISHED if status == "finished" else EXIT_INTERRUPTED


def _gpt2(run_dir: Path, plan: RunPlan, resolved: ResolvedTarget, stop: Stop, **fence: Any) -> str:
    """Train GPT-2; return the status of the record."""
    import torch

    from gpt2.trainer import TrainingRun
    from ra.admission.batches import examine_trained
    from ra.global_state import GlobalState
    from ra.variants import variant

    settings = plan.settings
    chosen = variant(plan.arm, settings.model, settings.alternation)
    with attention_kernels.attention_context(resolved, settings.model.dropout):
        own = chosen.configure(settings)
        training = TrainingRun(run_dir, plan, own, resolved, chosen.parts, stop, **fence)
        with training.stepper.autocast(), torch.no_grad():  # as in the examination at the end
            before = GlobalState(generators=False)
        training.examine = functools.partial(examine_trained, before=before)
        return training.train()


def on_cluster() -> bool:
    """Whether an executor of a cluster placed this process."""
    return os.environ.get(PLACE, "").startswith(("slurm", "ray"))


def refuse_another_card(planned: RecordedTarget | None, resolved: ResolvedTarget) -> None:
    """UserError if a cluster placed this run on another kind of card than that of the plan."""
    if planned is None or not on_cluster():
        return
    if (planned.device, planned.dtype) != (resolved.device_name, resolved.dtype):
        raise UserError(
            f"this node has {resolved.device_name}, {resolved.dtype}, and the study was planned on "
            f"{planned.device}, {planned.dtype}: a study has one kind of card; fix: request that kind, such as "
            'CONFIG_SLURM_OPTIONS="--gres=gpu:a100:1", or set another CONFIG_STUDY_NAME'
        )


def _answer(question: Question, stop: Stop) -> Any:
    """Return plain data: counted arms, step times, or the device of this machine."""
    from study.planner import CountArms, Steps, count_arms

    settings, asked = question.settings, question.asked
    if isinstance(asked, CountArms):
        from ra.variants import variant
        from study.preconditions import refuse_unknown_names

        variants = {
            name: variant(name, settings.model, settings.alternation) for name in asked.study.variants
        }
        refuse_unknown_names(settings, variants, asked.resolved.device_type)
        return to_plain(
            count_arms(settings, asked.study, asked.resolved, variants, asked.existing, asked.copies)
        )
    if isinstance(asked, Steps):
        return _time_steps(settings, asked, stop)
    return to_plain(resolve(settings.target))


def _time_steps(settings: Config, asked: Steps, stop: Stop) -> dict[str, Any]:
    """Time steps of the arms in turn; return their seconds by arm, and the peak memory."""
    import torch

    from gpt2.clocks import step_timer
    from gpt2.measured_memory import PeakMeter
    from ra.variants import variant
    from study.planning.micro_batch import Predictions, free_bytes, require_free
    from study.step_timing import measure_steps

    resolved = _join(settings)
    batch = plan_batch(settings.batch.effective, asked.micro, ranks.world(), settings.model.block_size)
    timed = {name: variant(name, settings.model, settings.alternation) for name in asked.arms}
    if resolved.device != "cpu":
        predictions = Predictions(settings, resolved)
        need = sum(predictions.peak_bytes(each, batch.micro) for each in timed.values())
        require_free(resolved, need, free_bytes(resolved.device))
    meter = PeakMeter(resolved.device)
    timer = step_timer(resolved.device, torch.get_num_threads(), ranks.world())
    with attention_kernels.attention_context(resolved, settings.model.dropout):
        seconds = measure_steps(
            settings, resolved, timed, batch, asked.seconds, stop, timer, meter.restart,
            until_steady=not settings.budget.max_time_seconds,  # with a count, step times serve estimates alone
        )  # fmt: skip
    return {"seconds": seconds, "peak_bytes": meter.peaks()["allocated"]}

"""Run small studies of B and RALEARN: stopped and resumed, out of memory, with a time budget. Check their records.

Their folders are kept, so that a later command has the undisturbed runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.card_checks import MEASURED, CardCheck, CheckedDevice, NotRunError, judge, number
from bench.cases import BASELINE, LEARNED
from bench.disturbed_train import VARIABLE, Disturbance
from bench.runner import BenchWorker
from gpt2.measured_memory import EXACT_HEAP
from gpt2.predicted_memory import predict
from ra.variants import variant
from runtime import attention_kernels, run_record
from runtime.batch_plan import next_smaller
from runtime.detected_hardware import detected_target_name
from runtime.dotconfig import read_symbols
from runtime.metrics_log import read_steps
from runtime.records import to_plain
from runtime.resolved_target import resolve
from runtime.run_record import RunRecord
from runtime.settings import Config
from study import kconfig_commands, kconfig_rules, plan_file
from study.executors.child_process import Session
from study.plan_file import Plan
from study.planning.memory_tables import format_bytes, measure_variant
from study.planning.micro_batch import Predictions
from study.study import Study

# Configure studies in temporary folders, as `make defconfig-NAME` would, without running them.


def configure_study(folder: Path, specification: str, **values: str) -> Study:
    """Configure `NAME+FRAGMENT...` with these symbols and results in `folder`. The user's .config stays unchanged."""
    tree = kconfig_rules.load_kconfig(detected_target_name())
    values = {"RESULTS_DIR": str(folder)} | values
    assignments = [f"CONFIG_{name}={value}" for name, value in values.items()]
    symbols = kconfig_commands.configure(tree, kconfig_commands.read_layers(specification), assignments)
    return Study(symbols, kconfig_rules.render(tree))


STEPS, STOP_AT = 14, 7
BUDGET_SECONDS = {False: 20, True: 8}  # of training, besides 15 s in which the plan times steps
NAMES = (BASELINE, LEARNED)
SPECIFICATIONS = {False: "gpt2-ra-ablation", True: "gpt2-ra-ablation-smoke"}
COMMON = {
    "SEEDS": "1",
    "SLOTS": "1",
    "GPT2_MAX_TIME": "0",
    "GPT2_MAX_ITERS": str(STEPS),
    "DATASET_EMBEDDED": "y",
    "DATASET_MAX_TOKENS": "1000000",
    "HELLASWAG": "n",
}
GPU = {"EFFECTIVE_BATCH": "128", "EVAL_TOKENS": "65536", "EVAL_INTERVAL_TOKENS": "1048576"}
UNDISTURBED, STOPPED, STARVED, TIMED = "undisturbed", "stopped", "out-of-memory", "budget"
LIMIT_SECONDS = 900.0
STARTS = 3  # of a study that is stopped once, at most
DIFFERENCE = 0.01  # nats between two runs on a GPU, whose kernels may add in another order
ROUNDING = 1e-4  # nats between two micro-batches on a CPU
ERROR = 0.1  # of a prediction: the share of the memory that a plan reserves
SHARES = {"planned": (0.8, 1.05), "used": (0.7, 1.2)}  # of the time budget


def study_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Train B undisturbed, then stopped and resumed."""
    yield from trained_checks(card, BASELINE)
    yield from resume_checks(card, BASELINE)


def learned_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Train RALEARN undisturbed, as an arm that the study of B gets, then stopped and resumed."""
    yield from trained_checks(card, LEARNED)
    yield from resume_checks(card, LEARNED)


def trained_checks(card: CheckedDevice, name: str) -> Iterator[CardCheck]:
    """Train an arm undisturbed; check its kernel, and on a GPU its memory."""
    record = undisturbed(card, name)
    assert record.target
    assert record.memory
    kernel = next(iter(attention_kernels.kernel_order(card.resolved)))
    if record.target.dtype != "float32" or card.on_cpu:
        used = record.target.attention_backend
        yield judge(f"study: kernel of {name}", kernel, used, used == kernel)
    clocks = ", ".join(f"{clock} {seconds:.1f} s" for clock, seconds in to_plain(record.clock).items())
    yield CardCheck(f"study: clocks of {name}", "", clocks, MEASURED)
    predicted, peak = record.memory.predicted_bytes, record.memory.peak_allocated_bytes
    if not card.on_cpu and predicted and peak:
        expected = f"at most {format_bytes(predicted)} in the compiled run, and {ERROR:.0%} more"
        yield judge(f"memory: compiled {name}", expected, format_bytes(peak), peak <= (1 + ERROR) * predicted)


def resume_checks(card: CheckedDevice, name: str) -> Iterator[CardCheck]:
    """Run a study of one arm, which is stopped in its run and resumed, and compare its losses."""
    label = f"{STOPPED}-{name}"
    statuses, opened = run(card, label, Disturbance(stop_at=STOP_AT), starts=STARTS, VARIANTS=name)
    expected = f"exit statuses 130, 0 for a study that is stopped at step {STOP_AT}"
    yield judge(
        f"study: stop and resume {name}", expected, ", ".join(map(str, statuses)), statuses == [130, 0]
    )
    line, expected = (
        "study: contexts of its own process",
        "no GPU with a context; the training process has it",
    )
    yield judge(line, expected, f"{opened}", opened == 0, "torch sees no GPU" if opened is None else "")
    limit = 0.0 if card.on_cpu else DIFFERENCE
    yield compare_losses(card, f"study: resumed losses of {name}", label, name, limit)


def memory_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Compare the predicted peak of each arm with that of a step and an evaluation that are not compiled."""
    batch = undisturbed(card, BASELINE).batch
    assert batch
    for name in NAMES:
        with BenchWorker(f"memory of {name}", EXACT_HEAP) as worker:
            arguments = (study_folder(card, UNDISTURBED), name, batch.micro)
            predicted, peak = worker.call(predicted_and_measured, *arguments, limit_seconds=LIMIT_SECONDS)
        expected = f"{format_bytes(predicted)} predicted for a step that is not compiled, within {ERROR:.0%}"
        measured = f"{format_bytes(peak)}; {predicted / peak - 1:+.1%} is the prediction's error"
        yield judge(f"memory: {name}", expected, measured, abs(predicted / peak - 1) <= ERROR)


def out_of_memory_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Give the training process too little memory for the planned micro-batch."""
    peak = undisturbed(card, BASELINE).memory
    planned = read_plan(card, UNDISTURBED).batch
    smaller = next_smaller(planned)
    if smaller is None or peak is None:
        raise NotRunError("the planned micro-batch is 1, and no smaller one exists")
    disturbance = Disturbance(largest_micro=smaller.micro)
    if not card.on_cpu:  # between the peaks at the two micro-batches
        disturbance = Disturbance(memory_bytes=int(0.8 * (peak.peak_allocated_bytes or 0)))
    (status,), _ = run(card, STARVED, disturbance, VARIANTS="B")
    batch = read_plan(card, STARVED).batch
    text = "exit status {}, micro-batch {}, effective batch {}"
    expected = text.format(0, smaller.micro, planned.effective)
    measured = text.format(status, batch.micro, batch.effective)
    yield judge("out of memory: next micro-batch", expected, measured, measured == expected)
    limit = ROUNDING if card.on_cpu else DIFFERENCE
    yield compare_losses(card, "out of memory: losses", STARVED, "B", limit)


def budget_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Plan a run by its time, and compare its count; its times are numbers."""
    limit = BUDGET_SECONDS[card.on_cpu]
    run(card, TIMED, VARIANTS="B", GPT2_MAX_TIME=str(limit), GPT2_MAX_ITERS="0")
    record, plan = finished(card, TIMED, BASELINE), read_plan(card, TIMED)
    assert record.progress
    planned, trained = plan.variants[BASELINE].iterations, record.progress.iterations
    yield judge("budget: iterations", f"{planned:,} planned", f"{trained:,} trained", planned == trained)
    times = {"planned": plan.planned_seconds(BASELINE) or 0.0, "used": record.progress.train_seconds}
    for name, seconds in times.items():
        low, high = (share * limit for share in SHARES[name])
        expected = f"{low:.1f} to {high:.1f} s of training for a limit of {limit} s"
        yield number(f"budget: time {name}", expected, f"{seconds:.1f} s", seconds)


def repeat_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Ask `make repeat` whether a step of RALEARN is reproducible."""
    undisturbed(card, LEARNED)
    folder = study_folder(card, UNDISTURBED) / "runs" / run_record.run_name(LEARNED, 0)
    command = [sys.executable, "-m", "scripts.repeat", f"--run={folder}", f"--step={STOP_AT}", "--times=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    lines = (done.stdout + done.stderr).strip().splitlines()
    yield judge("repeat: RALEARN", "exit status 0", f"{done.returncode}: {lines[-1]}", done.returncode == 0)


def undisturbed(card: CheckedDevice, name: str) -> RunRecord:
    """Return the record of an arm in the study that the others are compared with. Train it where it is missing."""
    with contextlib.suppress(NotRunError):
        return finished(card, UNDISTURBED, name)
    run(card, UNDISTURBED, VARIANTS=" ".join(dict.fromkeys((BASELINE, name))))
    return finished(card, UNDISTURBED, name)


# ---- records


def study_folder(card: CheckedDevice, label: str) -> Path:
    return card.folder / label / SPECIFICATIONS[card.on_cpu]


def read_plan(card: CheckedDevice, label: str) -> Plan:
    """Return the plan of a study. NotRunError where it has none."""
    plan = plan_file.read(study_folder(card, label))
    if plan is None:
        raise NotRunError(f"the {label} study has no plan")
    return plan


def finished(card: CheckedDevice, label: str, name: str) -> RunRecord:
    """Return the record of a finished run. NotRunError, with the run's error, for any other."""
    try:
        record = run_record.load(study_folder(card, label) / "runs" / run_record.run_name(name, 0))
    except run_record.RecordError as error:
        raise NotRunError(f"the {label} run of {name} has no record") from error
    if record.status != "finished":
        raise NotRunError(f"the {label} run of {name} is {record.status}: {record.error or 'no error'}")
    return record


def losses(card: CheckedDevice, label: str, name: str) -> list[float]:
    """Return the training losses of a finished run in nats, one for each step."""
    finished(card, label, name)
    folder = study_folder(card, label) / "runs" / run_record.run_name(name, 0)
    return [step.loss for step in read_steps(folder / "metrics.jsonl")]


def compare_losses(card: CheckedDevice, title: str, label: str, name: str, limit: float) -> CardCheck:
    """Compare a run's losses with those of the undisturbed one, which has the same seed."""
    one, other = (losses(card, each, name) for each in (UNDISTURBED, label))
    within = "equal to the bit" if not limit else f"within {limit:g} nats"
    expected = f"{STEPS} losses {within}"
    if not len(one) == len(other) == STEPS:
        return judge(title, expected, f"{len(one)} and {len(other)} losses", False)
    return judge(title, expected, describe_difference(one, other), largest(one, other) <= limit)


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def describe_difference(one: Sequence[float], other: Sequence[float]) -> str:
    if one == other:
        return "equal to the bit"
    first = next(number for number, (a, b) in enumerate(zip(one, other, strict=True), 1) if a != b)
    return f"largest difference {largest(one, other):.1e} nats; equal to the bit before step {first}"


# ---- in a worker


class CardStudy(Study):
    """A study whose training processes are disturbed, without admission."""

    def admit(self) -> None:
        pass


def run(
    card: CheckedDevice, label: str, disturbance: Disturbance | None = None, starts: int = 1, **changes: str
) -> tuple[list[int], int | None]:
    """Run a study, and start it up to `starts` times until it finishes. Only the undisturbed study goes on.

    Returns the exit statuses, and the GPUs on which the study's process has a context.
    """
    if label != UNDISTURBED:
        shutil.rmtree(card.folder / label, ignore_errors=True)
    values = COMMON | ({} if card.on_cpu else GPU) | {"DATA_DIR": str(card.folder / "data")} | changes
    with BenchWorker(f"{label} study") as worker:
        arguments = (card.folder / label, SPECIFICATIONS[card.on_cpu], values, disturbance or Disturbance())
        return worker.call(start_study, *arguments, starts, limit_seconds=LIMIT_SECONDS), worker.call(
            contexts
        )


def start_study(
    folder: Path, specification: str, values: dict[str, str], disturbance: Disturbance, starts: int
) -> list[int]:
    os.environ[VARIABLE] = json.dumps(dataclasses.asdict(disturbance))
    statuses: list[int] = []
    while len(statuses) < starts and 0 not in statuses:
        configured = configure_study(folder, specification, **values)
        study = CardStudy(configured.symbols, configured.config_text)
        study.session = Session("bench.disturbed_train")
        statuses.append(study.run())
    return statuses


def contexts() -> int | None:
    """Count the GPUs on which this process has a context; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return len([number for number in range(torch.cuda.device_count()) if has_context(number)])


def predicted_and_measured(study: Path, name: str, micro: int) -> tuple[int, int]:
    """Return the peak bytes of a variant's step and evaluation without compilation, predicted and in this process."""
    symbols = read_symbols(study / "config")
    config = Config.from_symbols(symbols)
    predictions = Predictions(config, resolve(config.target))
    work = predictions.work_at(variant(name, config.model, config.alternation), micro)
    predicted = predict(dataclasses.replace(work, compile=False)).peak_bytes
    return predicted, int(max(measure_variant(symbols, name, micro)["allocated"].values()))

"""Run small studies of B and RALEARN: stopped and resumed, out of memory, with a time budget. Check their records."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.card_checks import CardCheck, CheckedDevice, NotRunError, judge
from bench.cases import BASELINE, LEARNED
from bench.disturbed_train import VARIABLE, Disturbance
from bench.runner import BenchWorker
from gpt2.measured_memory import EXACT_HEAP
from runtime import attention_kernels, run_record
from runtime.batch_plan import next_smaller
from runtime.detected_hardware import detected_target_name
from runtime.dotconfig import read_symbols
from runtime.metrics_log import read_steps
from runtime.run_record import RunRecord
from study import kconfig_commands, kconfig_rules, plan_file
from study.executors.child_process import Session
from study.plan_file import Plan
from study.planning.memory_page import format_bytes, measure_variant
from study.study import Study

# Configure studies in temporary folders, as `make defconfig-NAME` would, without running them.


def configure_study(folder: Path, specification: str, **values: str) -> Study:
    """Configure `NAME+FRAGMENT...` with these symbols and results in `folder`. The user's .config stays unchanged."""
    tree = kconfig_rules.load_kconfig(detected_target_name())
    values = {"RESULTS_DIR": str(folder / "results")} | values
    assignments = [f"CONFIG_{name}={value}" for name, value in values.items()]
    symbols = kconfig_commands.configure(tree, kconfig_commands.read_layers(specification), assignments)
    return Study(symbols, kconfig_rules.render(tree))


STEPS, STOP_AT = 14, 7
BUDGET_SECONDS = {False: 20, True: 8}  # of training, besides 15 s in which the plan times steps
NAMES = (BASELINE, LEARNED)
SPECIFICATIONS = {False: "gpt2-ra-ablation", True: "gpt2-ra-ablation-smoke"}
COMMON = {
    "VARIANTS": " ".join(NAMES),
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
STARTS = 4  # of a study that is stopped in each of its two runs
DIFFERENCE = 0.01  # nats between two runs on a GPU, whose kernels may add in another order
ROUNDING = 1e-4  # nats between two micro-batches on a CPU
ERROR = 0.1  # of a prediction: the share of the memory that a plan reserves
PLANNED, USED = (0.8, 1.05), (0.7, 1.2)  # shares of the time budget: of the plan, and of the run


def study_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Run a study twice, once stopped in each run, and compare losses, kernels and memory."""
    run_undisturbed(card)
    statuses, opened = run(card, STOPPED, Disturbance(stop_at=STOP_AT), starts=STARTS)
    expected = f"exit statuses 130, 130, 0 for a study that is stopped at step {STOP_AT} of each run"
    yield judge("study: stop and resume", expected, ", ".join(map(str, statuses)), statuses == [130, 130, 0])
    name, expected = (
        "study: contexts of its own process",
        "no GPU with a context; the training process has it",
    )
    yield judge(name, expected, f"{opened}", opened == 0, "torch sees no GPU" if opened is None else "")
    kernel = next(iter(attention_kernels.kernel_order(card.resolved)))
    for name in NAMES:
        record = finished(card, UNDISTURBED, name)
        target = record.target
        assert target
        if target.dtype != "float32" or card.on_cpu:
            used = target.attention_backend
            yield judge(f"study: kernel of {name}", kernel, used, used == kernel)
        limit = 0.0 if card.on_cpu else DIFFERENCE
        yield compare_losses(card, f"study: resumed losses of {name}", STOPPED, name, limit)


def memory_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Compare the predicted peak with that of one step without compilation, and with that of the run on a GPU."""
    run_undisturbed(card)
    for name in NAMES:
        record = finished(card, UNDISTURBED, name)
        assert record.batch
        assert record.memory
        predicted = read_plan(card, UNDISTURBED).variants[name].predicted_bytes
        if not predicted:
            raise NotRunError(f"the plan predicts no memory for {name}")
        with BenchWorker(f"memory of {name}", EXACT_HEAP) as worker:
            arguments = (card.folder, study_folder(card, UNDISTURBED), name, record.batch.micro)
            peak = worker.call(peak_bytes, *arguments, limit_seconds=LIMIT_SECONDS)
        measured = f"{format_bytes(peak)}; {predicted / peak - 1:+.1%} is the prediction's error"
        expected = f"{format_bytes(predicted)} predicted for a step that is not compiled, within {ERROR:.0%}"
        yield judge(f"memory: {name}", expected, measured, abs(predicted / peak - 1) <= ERROR)
        used = record.memory.peak_allocated_bytes
        if not card.on_cpu and used:
            expected = f"at most {format_bytes(predicted)} in the compiled run, and {ERROR:.0%} more"
            name = f"memory: compiled {name}"
            yield judge(name, expected, format_bytes(used), used <= (1 + ERROR) * predicted)


def out_of_memory_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Give the training process too little memory for the planned micro-batch."""
    run_undisturbed(card)
    planned = read_plan(card, UNDISTURBED).batch
    smaller = next_smaller(planned)
    peak = finished(card, UNDISTURBED, "B").memory
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
    """Plan a run by its time, and compare its count and its time."""
    limit = BUDGET_SECONDS[card.on_cpu]
    run(card, TIMED, VARIANTS="B", GPT2_MAX_TIME=str(limit), GPT2_MAX_ITERS="0")
    record, plan = finished(card, TIMED, "B"), read_plan(card, TIMED)
    assert record.progress
    planned, trained = plan.variants["B"].iterations, record.progress.iterations
    yield judge("budget: iterations", f"{planned:,} planned", f"{trained:,} trained", planned == trained)
    seconds, shared = record.progress.train_seconds, "a CPU is shared with other processes"
    yield compare_time("planned", plan.planned_seconds("B") or 0.0, limit, PLANNED)
    yield compare_time("used", seconds, limit, USED, f"{seconds:.1f} s; {shared}" if card.on_cpu else "")


def compare_time(
    name: str, seconds: float, limit: int, shares: tuple[float, float], reason: str = ""
) -> CardCheck:
    low, high = (share * limit for share in shares)
    expected = f"{low:.1f} to {high:.1f} s of training for a limit of {limit} s"
    return judge(f"budget: time {name}", expected, f"{seconds:.1f} s", low <= seconds <= high, reason)


def run_undisturbed(card: CheckedDevice) -> None:
    """Run the study that the others are compared with, once."""
    if not study_folder(card, UNDISTURBED).exists():
        run(card, UNDISTURBED)


# ---- records


def study_folder(card: CheckedDevice, label: str) -> Path:
    return card.folder / label / "results" / SPECIFICATIONS[card.on_cpu]


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
    return [step.loss for step in read_steps(folder / "metrics.jsonl").steps]


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
    """A study whose training processes are disturbed, without attention maps."""

    def inspect_attention(self) -> None:
        pass


def run(
    card: CheckedDevice, label: str, disturbance: Disturbance | None = None, starts: int = 1, **changes: str
) -> tuple[list[int], int | None]:
    """Run a study, and start it up to `starts` times until it finishes.

    Returns the exit statuses, and the GPUs on which the study's process has a context.
    """
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


def peak_bytes(folder: Path, study: Path, name: str, micro: int) -> int:
    """Return the peak bytes of a variant's step and evaluation in this process, without compilation."""
    symbols = read_symbols(study / "config")
    found = measure_variant(symbols, name, micro, folder, eager=True)
    return int(max(found["allocated"].values()))

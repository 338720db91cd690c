"""Preconditions of a study: one `make` at a time, one configuration, unchanged variants, free disk space."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ra import arms
from ra.arms import parse_arm
from runtime import files, records, run_plan, run_record
from runtime.declared_symbols import Effect, symbols_of
from runtime.errors import UserError, free_bytes, gib
from runtime.files import DamagedFileError, read_bytes, read_text
from runtime.run_plan import RunPlan
from runtime.settings import Config
from study import plan_file
from study.experiment import planned_seeds, recorded_primary
from study.hellaswag_scores import HELLASWAG, accuracy, items_text
from study.runs import read_records, read_runs
from study.study_settings import declared

if TYPE_CHECKING:
    from ra.variants import Variant


LOCK = "lock"


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a study; False also where there is no lock file."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Lock the study's folder for one `make`; the value is the descriptor that holds the lock.

    The system drops the lock with the last process that has the descriptor, so no lock is ever stale. A training
    process that still saves after its study was killed holds the lock until it is done.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = files.open_append(directory / LOCK)
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written: {error.strerror}; fix: set CONFIG_RESULTS_DIR to a writable folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (content_or_none(directory / LOCK) or b"").decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"{directory} is being run by process {holder} (or by its training process, "
                "which still saves); fix: wait for it or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield file.fileno()


def content_or_none(path: Path) -> bytes | None:
    """Return the content of a file, None if it is missing or cannot be read."""
    try:
        return read_bytes(path)
    except (FileNotFoundError, DamagedFileError):
        return None


def refuse_another_configuration(directory: Path, config_text: str) -> None:
    """Raise UserError that names every change of effect since the study began: a study only grows.

    Before the first run the seeds, the variants and the primary comparison may change, too.
    """
    started = any(directory.glob("runs/*/"))
    if not started and not (directory / plan_file.FILE).exists():
        return
    for path in (directory / "config", *sorted(directory.glob("runs/*/config"))):
        with contextlib.suppress(FileNotFoundError, DamagedFileError):
            before = read_text(path)
            break
    else:
        return
    changed = differing_symbols(before, config_text, {"numbers", "verdict"}, {"design"})
    changed += _shrunk(before, config_text) if started else []
    if changed:
        raise UserError(
            f"{path} has another configuration than .config ({'; '.join(changed)}); a study only grows: seeds and "
            "variants can be added, and nothing else of effect on its numbers and verdicts changes; fix: set another "
            "CONFIG_STUDY_NAME, or restore the first values in .config"
        )


# Entries of a run's plan that may change when it continues, besides symbols of effect rounding or free: the split of a
# batch, the device, the place of the items. iterations has what follows from the budget.
MAY_CHANGE = (
    "batch.micro", "batch.accumulation", "batch.world_size", "predicted_bytes", "target", "hellaswag",
    "hellaswag_absent", "settings.sha256",
)  # fmt: skip


def refuse_another_plan(run_dir: Path, plan: RunPlan) -> None:
    """Raise UserError where a run that has begun has a damaged plan.json, or one that gives it other numbers.

    plan: what the study plans for the run now.
    """
    path = run_dir / run_plan.FILE
    if not (run_dir / "metrics.jsonl").exists() and not checkpoint_bytes(run_dir):
        return
    fix = f"fix: restore the file from a copy, or delete {run_dir} to train the run from the start"
    try:
        before = records.read(RunPlan, path)
    except FileNotFoundError:
        return
    except DamagedFileError as error:
        raise UserError(f"{error}, and its run has begun; {fix}") from error
    if differing := list(_differing(before, plan)):
        raise UserError(
            f"{path} differs from the plan that the study makes now ({'; '.join(differing)}), and its run has begun; "
            f"{fix}"
        )


def _differing(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield each entry with its two values that differs in two plans of a run, and may not."""
    if not (isinstance(before, RunPlan) or dataclasses.is_dataclass(before)) or type(before) is not type(now):
        if before != now:
            yield f"{place}: {before} -> {now}"
        return
    symbols = {} if isinstance(before, RunPlan) else symbols_of(type(before))
    for name in get_type_hints(type(before)):
        inner = f"{place}.{name}" if place else name
        if inner not in MAY_CHANGE and (
            name not in symbols or symbols[name].effect in ("numbers", "verdict")
        ):
            yield from _differing(getattr(before, name), getattr(now, name), inner)


def differing_symbols(before: str, now: str, effects: Set[Effect], free: Set[str]) -> list[str]:
    """Return each symbol of the effects that differs, with its two values. free: entries of symbols that may differ."""
    old, new = symbol_values(before), symbol_values(now)
    return [
        f"CONFIG_{name}: {old.get(name)} -> {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if declared(name).effect in effects and declared(name).entry not in free
        if old.get(name) != new.get(name)
    ]


def _shrunk(before: str, now: str) -> list[str]:
    """Return the change of fewer seeds, of removed variants and of another primary comparison."""
    texts = (before, now)
    old, new = ({name: value.strip('"') for name, value in symbol_values(text).items()} for text in texts)
    changes = []
    if planned_seeds(new) < planned_seeds(old):
        changes.append(f"CONFIG_SEEDS: {planned_seeds(old)} -> {planned_seeds(new)}")
    if not set(old.get("VARIANTS", "").split()) <= set(new.get("VARIANTS", "").split()):
        changes.append(f"CONFIG_VARIANTS: {old.get('VARIANTS')} -> {new.get('VARIANTS')}")
    if recorded_primary(old) not in (recorded_primary(new), "", None):
        changes.append(f"CONFIG_PRIMARY: {recorded_primary(old)} -> {recorded_primary(new)}")
    return changes


def earlier_looks(results_dir: Path, config_text: str, arm: str, seeds: range) -> tuple[int, ...]:
    """Return the numbers of these seeds at which older studies with the same numbers judged the arm, ascending."""
    found = set()
    for path in results_dir.glob(f"*/{plan_file.FILE}"):
        plan, directory = plan_file.read_valid(path.parent), path.parent
        if plan is None or arm not in plan.looks or not (directory / "config").exists():
            continue
        if differing_symbols(read_text(directory / "config"), config_text, {"numbers"}, set()):
            continue
        done = [
            one.seed
            for one in read_records(directory).values()
            if one.variant == arm and one.status == "finished"
        ]
        for count in plan.looks[arm]:
            looked = range(plan.first_seed, plan.first_seed + count)
            if set(looked) <= set(done):
                found.add(len(set(looked) & set(seeds)))
    return tuple(sorted(found - {0}))


def refuse_unknown_names(config: Config, variants: Mapping[str, Variant], device_type: str) -> None:
    """Raise UserError where a word of CONFIG_NUMERICS_FIX has no effect in an arm, or a monitor's target in none.

    device_type: of the runs. No memory is allocated. Examination names an arm that cannot be built.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from gpt2.training_step import build_model
    from gpt2.watch import check_fixes
    from referee.numerics.monitor.targets import ModelNames, parse_targets

    targets = [target for target in parse_targets(config.monitor.targets) if target.path]
    if not config.numerics_fix and not targets:
        return
    models = {}
    with contextlib.suppress(Exception, SystemExit), FakeTensorMode(allow_non_fake_inputs=True):
        for name, variant in variants.items():
            models[name] = build_model(variant.model, variant.parts)
    for name, model in models.items():
        try:
            check_fixes(model, config.numerics_fix, device_type)
        except UserError as error:
            raise UserError(f"arm {name}: {error}") from error
    names = [ModelNames.of(model) for model in models.values()]
    for target in targets:
        if names and not any(one.matches(target) for one in names):
            raise UserError(f"CONFIG_MONITOR_TARGETS: {names[0].problem(target)}")


def quarantine_damaged(directory: Path) -> list[str]:
    """Move each damaged config and run.json of the study into a folder damaged/ beside it. Returns messages.

    Nothing is lost: a run without a record continues from its checkpoint, and `make` writes the configuration.
    """
    damaged = []
    try:
        read_text(directory / "config")
    except FileNotFoundError:
        pass
    except DamagedFileError as error:
        damaged.append((directory / "config", f"{error}", "the configuration of the runs is used"))
    for folder in sorted(directory.glob("runs/*/")):
        try:
            run_record.load(folder)
        except run_record.RecordError as error:
            if os.path.lexists(folder / "run.json"):
                damaged.append((folder / "run.json", f"{error}", "the run continues from its checkpoint"))
    if not damaged:
        return []
    with locked(directory):
        return [f"{reason}; moved to {files.quarantine(path)}; {then}" for path, reason, then in damaged]


def symbol_values(text: str) -> dict[str, str]:
    """Return the values of the CONFIG lines by symbol; symbols that are off are absent."""
    pairs = (line.partition("=") for line in text.split("\n") if line.startswith("CONFIG_"))
    return {name.removeprefix("CONFIG_"): value for name, _, value in pairs}


def refuse_other_items(directory: Path, source: Path, items: int, digest: str) -> None:
    """Raise UserError if a run has a HellaSwag score on items with another number or digest."""
    for run in read_runs(directory):
        row = accuracy(run, HELLASWAG)
        if row and row.data != f"{HELLASWAG.key}@{digest[:12]}":
            raise UserError(
                f"{source} gives {items:,} items (SHA-256 {digest[:12]}), but {run.name} was scored on "
                f"{items_text(row)}; fix: "
                "use the items of the existing scores, or set another CONFIG_STUDY_NAME"
            )


def snapshot_sources(study_dir: Path, variants: Iterable[str], has_runs: Callable[[str], bool]) -> None:
    """Copy ra/custom/<name>.py of each custom variant to <study_dir>/own/. UserError if one with runs changed.

    has_runs(name): whether a run of that variant exists that must stay comparable. Modules that the file imports are
    not compared.
    """
    parsed = [parse_arm(name) for name in variants]
    for name in dict.fromkeys(file for arm in parsed for file in arm.file_variants if arms.is_custom(file)):
        users = [arm.name for arm in parsed if name in arm.file_variants]
        source = arms.source(name)
        copy = study_dir / "own" / source.name
        try:
            content = read_bytes(source)
        except (FileNotFoundError, DamagedFileError) as error:
            raise UserError(f"{error}; fix: restore ra/custom/{source.name}") from error
        if content_or_none(copy) == content:
            continue
        if os.path.lexists(copy) and any(map(has_runs, users)):
            raise UserError(
                f"ra/custom/{source.name} differs from the source of existing runs of {name} ({copy}); fix: "
                "set another CONFIG_STUDY_NAME, or restore the file from that copy"
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(copy, content)


BYTES_A_PARAMETER = 12  # of a checkpoint: the weight and AdamW's two moments in float32
# Of a parameter in a finished run: its last checkpoint; that and the one at the decay start; the trained model of GRPO.
KEPT_BYTES = {"cosine": 12, "wsd": 24, "grpo": 4}
WHILE_RUNNING = 3  # checkpoints of the run in progress: the last two and the one being written
BYTES_AN_ITERATION = 400  # of metrics.jsonl
SPARE_BYTES = 64 * 2**20  # reports, logs, and other use of the disk


def needed_bytes(parameters: int, iterations: list[int], kept: str = "cosine") -> int:
    """Most bytes that runs of these iterations write. kept: a key of KEPT_BYTES."""
    if not iterations:
        return 0
    running = WHILE_RUNNING * BYTES_A_PARAMETER * parameters
    finished = KEPT_BYTES[kept] * parameters * len(iterations)
    return running + finished + BYTES_AN_ITERATION * sum(iterations) + SPARE_BYTES


def checkpoint_bytes(run_dir: Path) -> int:
    """Bytes of the existing checkpoints of a run."""
    folders = [run_dir / kind for kind in run_record.CHECKPOINTS]
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def require_space(
    directory: Path, parameters: int, iterations: list[int], kept: str = "cosine", written: int = 0
) -> None:
    """Raise UserError if the disk of `directory` has less free space than runs of these iterations need.

    kept: a key of KEPT_BYTES. written: bytes of existing checkpoints.
    """
    needed, free = max(0, needed_bytes(parameters, iterations, kept) - written), free_bytes(directory)
    if free < needed:
        raise UserError(
            f"{directory} has {gib(free)} of free space; {len(iterations)} runs need about {gib(needed)} "
            f"({gib(BYTES_A_PARAMETER * parameters)} a checkpoint); fix: free disk space, or "
            "set CONFIG_RESULTS_DIR to another disk"
        )

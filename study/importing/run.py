"""Write imported weights as a finished run of B without a step, so that the commands for runs read them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from gpt2.artifacts import run_record
from gpt2.artifacts.run_record import RunRecord, StartedFrom
from gpt2.config.batch import plan_batch
from gpt2.config.config import Config
from gpt2.data import dataset
from gpt2.eval import hellaswag_download
from gpt2.hardware import attention_kernels
from gpt2.interop.pretrained import Pretrained
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.system.signals import Stop
from gpt2.train.run_plan import RunPlan
from gpt2.train.trainer import TrainingRun
from ra.settings import AlternationSettings
from ra.variants import variant
from study.executors import claims

VARIANT, SEED = "B", 0


@dataclass(frozen=True)
class Imported:
    """A run of imported weights. present: whether it was there before."""

    folder: Path
    record: RunRecord
    present: bool


def find_imported(weights: Pretrained, out: Path) -> Imported | None:
    """Return the finished run of these weights; None without. UserError where the folder has another one."""
    folder = out / "runs" / weights.name
    try:
        record = run_record.load(folder)
    except run_record.RecordError:
        if folder.exists() and not (folder / "config").exists() and any(folder.iterdir()):
            raise UserError(f"{folder} has other content; fix: OUT=another folder") from None
        return None
    if not record.imported or not record.started_from or record.started_from.sha256 != weights.sha256:
        known = record.started_from.sha256[:12] + "..." if record.started_from else "none"
        raise UserError(
            f"{folder} is of other weights (SHA-256 {known}, not {weights.sha256[:12]}...); fix: OUT=another folder"
        )
    return Imported(folder, record, True) if record.status == "finished" else None


def import_run(
    weights: Pretrained, out: Path, config: Config, config_text: str, alternation: AlternationSettings
) -> Imported:
    """Evaluate the weights as training does, and write results/imported/runs/<name>. config: of its .config."""
    weights.check(config.model)
    folder = out / "runs" / weights.name
    dataset.check_corpus(dataset.prepare(config.data, report=print), config.model.block_size, report=print)
    items: Path | str = "CONFIG_HELLASWAG is off"
    if config.evaluation.hellaswag:
        items = hellaswag_download.obtain(config.evaluation, config.data.directory, report=print)
    resolved = attention_kernels.prepare_device(config.target, config.model)
    plan = RunPlan(
        directory=folder,
        run=weights.name,
        variant=VARIANT,
        seed=SEED,
        iterations=0,
        batch=plan_batch(config.batch.effective, 1, 1, config.model.block_size),
        hellaswag=items,
        started_from=StartedFrom(weights.source, weights.sha256),
    )
    chosen = variant(VARIANT, config.model, alternation)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / "config", config_text)
        with (
            claims.claimed(folder) as claim,
            (folder / "log.txt").open("a") as log,
            attention_kernels.attention_context(resolved, config.model.dropout),
            contextlib.redirect_stdout(log),
        ):
            status = TrainingRun(
                plan,
                chosen.configure(config),
                resolved,
                chosen.parts,
                Stop(),
                shared=config,
                fence=claim.check,
            ).train()
    except OSError as error:
        reason = error.strerror or os.fspath(folder)
        raise UserError(f"{folder} cannot be written: {reason}; fix: OUT=another folder") from error
    if status != "finished":
        raise UserError(f"{folder} is {status}; fix: repeat the command")
    return Imported(folder, run_record.load(folder), False)

"""Run what is missing of a GRPO study, each run in a process of its own. Needs neither torch nor TRL."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from grpo import records
from grpo.grpo_settings import GrpoSettings, run_name
from grpo.gsm8k import digest, read_problems
from runtime.errors import UserError, one_line
from runtime.files import DamagedFileError, write_text

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def check(settings: GrpoSettings) -> str:
    """Return the identity of the study. UserError where a run would fail: packages, problems, model, earlier runs."""
    trackers = [name for name in ("wandb", "tensorboard") if getattr(settings.tracking, name)]
    missing = [name for name in (*PACKAGES, *trackers) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"this Python lacks {', '.join(missing)}; fix: make grpo (without PYTHON= it installs them)"
        )
    train, test = read_problems(settings.train_file, "train"), read_problems(settings.test_file, "test")
    if settings.steps(len(train)) == 0:
        raise UserError(
            f"{len(train)} training problems are fewer than CONFIG_GRPO_PROMPTS={settings.prompts}; fix: a smaller one"
        )
    _check_model(settings.model)
    identity = settings.identity(digest(train, test))
    for arm, seed in settings.runs:
        record = read_record(settings.run_dir(arm, seed))
        if record and record.identity != identity:
            raise UserError(
                f"{settings.run_dir(arm, seed)} has other settings, problems or model than .config; fix: another "
                "CONFIG_STUDY_NAME, or move the folder away"
            )
    return identity


def _check_model(name: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{name} has no config.json; fix: CONFIG_GRPO_MODEL= a folder with a model")
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(
            f"CONFIG_GRPO_MODEL={name} does not exist; fix: a folder with a model, or a name on the hub"
        )
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, "config.json")
    except Exception as error:  # whatever a network and a cache raise
        raise UserError(
            f"{name} is not a folder and cannot be loaded from the hub ({type(error).__name__}: "
            f"{one_line(error)[:120]}); fix: connect to the hub, or CONFIG_GRPO_MODEL= a folder with the model"
        ) from None


def read_record(run_dir: Path) -> records.GrpoRecord | None:
    """Return the record of a run. UserError for a damaged one."""
    try:
        return records.read(run_dir)
    except DamagedFileError as error:
        raise UserError(f"{error}; fix: move {run_dir} away (make grpo repeats the run)") from None


def run_study(settings: GrpoSettings, config: str, ended: Callable[[], object]) -> None:
    """Train the runs that are not finished or diverged. UserError where one fails; the others keep their records.

    ended: called after each run.
    """
    runs = settings.runs
    for number, (arm, seed) in enumerate(runs, 1):
        run_dir, name = settings.run_dir(arm, seed), run_name(arm, seed)
        record = read_record(run_dir)
        if record and record.status in records.ENDED:
            continue
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / records.CONFIG, config)
        resumed = f", {record.status} at step {record.step}" if record else ""
        print(f"[{number}/{len(runs)}] {name}{resumed}", flush=True)
        status = _child(run_dir / records.CONFIG, arm, seed)
        record = read_record(run_dir)
        if status in (-signal.SIGINT, records.EXIT_INTERRUPTED) or (
            record and record.status == records.INTERRUPTED
        ):
            raise KeyboardInterrupt
        if status or not record or record.status not in records.ENDED:
            raise UserError(
                f"{name} ended with status {status} before its end; see {run_dir / 'log.txt'} and the lines above; "
                "fix: correct the cause and run make grpo (it resumes)"
            )
        ended()


def _child(config: Path, arm: str, seed: int) -> int:
    """Run `python -m grpo.worker` and pass a signal on to it. Returns its exit status."""
    environment = {"CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ)
    command = [sys.executable, "-m", "grpo.worker", str(config), arm, str(seed)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the terminal sent it to the child, too, which ends after its step
                print("stopping after this step", flush=True)
    finally:
        signal.signal(signal.SIGTERM, previous)
        if process.poll() is None:
            process.kill()
            process.wait()

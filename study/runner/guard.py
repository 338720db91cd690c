"""What keeps a study whole: one `make` at a time in its folder, and one configuration from beginning to end."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError
from study.records.hellaswag_scores import Items, scored_items

# What may change between two `make` of one study without making its runs incomparable.
FREE_SYMBOLS = {
    "SEEDS", "VARIANTS", "CHECKPOINT_SECONDS", "DATA_WORKERS", "DATA_DIR", "RESULTS_DIR",
    "WANDB", "WANDB_MODE", "WANDB_PROJECT", "TRACKIO",
    "SCHEDULE_COSINE",  # SCHEDULE_WSD says it, and studies from before the choice have neither
}  # fmt: skip
BUDGET_SYMBOLS = {"GPT2_MAX_TIME", "GPT2_MAX_TOKENS", "GPT2_MAX_ITERS"}


class StudyError(UserError, RuntimeError):
    """The study cannot go on as it is."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """One `make` a study: the descriptor that holds its lock.

    The system drops the lock with the last process that has the descriptor, so that none is ever stale, and a training
    process that is still saving after its study was killed holds it until it is done.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+")
    except OSError as error:
        raise StudyError(
            f"{directory} cannot be written: {error.strerror}; see CONFIG_RESULTS_DIR"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise StudyError(
                f"{directory} is being run by process {file.read().strip() or 'unknown'} (or by the training process "
                "that it left, which is saving); wait for it or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def refuse_another_configuration(directory: Path, config_text: str) -> None:
    """The study's runs must stay comparable: StudyError names every symbol that differs from when it began.

    The budget's symbols stay those of the first budget: what `make extend` made of it stands in plan.json alone.
    """
    path = directory / "config"
    if not path.exists():
        return
    before, now = _values(path.read_text()), _values(config_text)
    names = sorted((before.keys() | now.keys()) - FREE_SYMBOLS)
    differing = [n for n in names if before.get(n) != now.get(n)]
    if differing:
        listed = "; ".join(f"CONFIG_{n}: {before.get(n)} -> {now.get(n)}" for n in differing)
        raise StudyError(
            f"{directory} was begun with another configuration ({listed}); right: another CONFIG_STUDY_NAME, or the "
            f"configuration that it was begun with{_longer(before, now)}"
        )


def _longer(before: dict[str, str], now: dict[str, str]) -> str:
    """What to say to somebody who gave the study a larger budget."""
    budgets = [[int(values.get(name, 0)) for name in sorted(BUDGET_SYMBOLS)] for values in (before, now)]
    if not any(0 < old < new for old, new in zip(*budgets, strict=True)):
        return ""
    if before.get("SCHEDULE_WSD") == "y":
        return " and, for longer runs, `make extend FACTOR=2`"
    return " (its cosine schedule cannot be extended; a study with CONFIG_SCHEDULE_WSD=y can)"


def _values(text: str) -> dict[str, str]:
    """CONFIG lines as they stand; symbols that are off are absent."""
    pairs = (line.partition("=") for line in text.splitlines() if line.startswith("CONFIG_"))
    return {name.removeprefix("CONFIG_"): value for name, _, value in pairs}


def refuse_other_items(directory: Path, source: Path, items: int, digest: str) -> None:
    """StudyError where a run of the study has a HellaSwag score on other items than the `items` of this digest.

    A score from before digests were kept is told apart by the number of its items alone.
    """
    for folder in sorted((directory / "runs").glob("*/")):
        with contextlib.suppress(run_record.RecordError):
            seen = scored_items(run_record.load(folder))
            if seen and seen != Items(items, digest if seen.sha256 else ""):
                raise StudyError(
                    f"{source} gives {Items(items, digest)}, but {folder.name} was scored on {seen}; right: "
                    "the items of the scores that stand, or another CONFIG_STUDY_NAME for these"
                )

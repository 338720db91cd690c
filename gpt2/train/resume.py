"""Check that a checkpoint belongs to a run, and restore the run's clocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt2.artifacts.checkpoint import Loaded
from gpt2.artifacts.run_record import RunRecord
from gpt2.system.errors import UserError


class RunError(UserError, RuntimeError):
    """The run cannot resume from its checkpoint."""


def refuse_another_run(
    loaded: Loaded, now: dict[str, Any], run: str, directory: Path, extended: bool
) -> None:
    """Raise RunError where the checkpoint has other data, weights, settings or another length.

    now: the values that must agree between two processes of the run. An extended run starts from the checkpoint at
    the decay of a shorter one, so its length and schedule may differ. Older checkpoints have no warm-up to compare.
    """
    restart = f"set another CONFIG_STUDY_NAME, or delete {directory} to train it from the start"
    if "of" not in loaded.meta:
        raise RunError(
            f"the checkpoint of {run} at iteration {loaded.iteration} does not name its data, weights and settings "
            "(an older version wrote it: its meta.json has no `of`), so the run cannot resume from it; fix: use the "
            f"version that wrote it, or {restart}"
        )
    before = {"warmup_iterations": now.get("warmup_iterations")} | loaded.meta["of"]
    differing = [name for name in now if before.get(name) != now[name]]
    if extended and before.get("iterations") != now["iterations"]:
        differing = [name for name in differing if name not in ("iterations", "schedule")]
    if differing:
        shown = ", ".join(
            f"{name} ({before.get(name)} -> {now[name]})" if "iterations" in name else name
            for name in differing
        )
        raise RunError(
            f"{run} was started with another {shown}, so it cannot resume from its checkpoint; fix: restore the former "
            f"value, or {restart}"
        )


def clocks_before(loaded: Loaded, written: RunRecord | None) -> dict[str, float]:
    """Return the clocks at the checkpoint in seconds. The record written after it includes the time of saving."""
    clocks: dict[str, float] = loaded.meta["clocks"]
    if written and written.clock and written.progress and written.progress.iterations == loaded.iteration:
        return {name: max(clocks[name], written.clock[name]) for name in clocks}
    return clocks

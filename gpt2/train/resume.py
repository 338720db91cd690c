"""From what a run that was cut off goes on: a checkpoint that is its own, with every clock where it stood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt2.artifacts.checkpoint import Loaded
from gpt2.artifacts.run_record import RunRecord
from gpt2.system.errors import UserError


class RunError(UserError, RuntimeError):
    """The run cannot go on from what is there."""


def refuse_another_run(
    loaded: Loaded, now: dict[str, Any], run: str, directory: Path, extended: bool
) -> None:
    """RunError where the checkpoint is of other data, weights or settings, or of a run of another length.

    now: what must not change between two processes of the run. An extended run begins from where the decay of a
    shorter one began: its length and schedule are others. A checkpoint from before the warm-up was kept is not
    asked for it.
    """
    anew = f"another CONFIG_STUDY_NAME, or delete {directory} to begin it anew"
    if "of" not in loaded.meta:
        raise RunError(
            f"the checkpoint of {run} at iteration {loaded.iteration} does not say what data, weights and settings "
            "it is of (no `of` in its meta.json: an older version wrote it): it cannot be gone on from; right: the "
            f"version that it was begun with, or {anew}"
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
            f"{run} was begun with another {shown}: its checkpoint cannot be gone on from; right: what it was begun "
            f"with, or {anew}"
        )


def clocks_before(loaded: Loaded, written: RunRecord | None) -> dict[str, float]:
    """The clocks at the checkpoint, in seconds; the record written after it knows what writing it took."""
    clocks: dict[str, float] = loaded.meta["clocks"]
    if written and written.clock and written.progress and written.progress.iterations == loaded.iteration:
        return {name: max(clocks[name], written.clock[name]) for name in clocks}
    return clocks

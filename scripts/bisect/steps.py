"""Search over steps: the first whose state differs, by hashes of checkpoints and of replayed steps."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt2.artifacts import checkpoint, run_record
from gpt2.system.errors import UserError
from gpt2.train.step import Stepper
from scripts.bisect.play import Player
from scripts.bisect.session import Result

Digests = dict[str, str]
MOST_NAMES = 3


def digests(state: dict[str, Any]) -> Digests:
    """Return a hash of each weight and moment in a state of gpt2.train.step.Stepper."""
    names = list(state["model"])
    found = {f"weight {name}": _digest(tensor) for name, tensor in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {
            f"{kind} of parameter {number} of {len(names)}": _digest(value)
            for kind, value in moments.items()
            if isinstance(value, Tensor)
        }
    return found


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(-1)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def checkpoints(run_dir: Path) -> dict[int, Digests]:
    """Return iteration -> hashes of every readable checkpoint of a run."""
    found: dict[int, Digests] = {}
    for folder in run_record.CHECKPOINTS:
        for path in checkpoint.complete(run_dir / folder):
            try:
                loaded = checkpoint.load(path)
            except UserError:
                continue
            found[loaded.iteration] = digests(loaded.state)
    return found


def unequal(one: Digests, other: Digests) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def search_steps(runs: tuple[Path, Path], players: tuple[Player, Player | None], last: int) -> Result:
    """Compare checkpoints of both runs, then the states after each replayed step of both."""
    saved = [checkpoints(run) for run in runs]
    rows = []
    for iteration in sorted({*saved[0]} & {*saved[1]}):
        differ = unequal(saved[0][iteration], saved[1][iteration])
        rows.append((f"checkpoints after step {iteration}", _named(differ)))
    states: list[dict[int, Digests]] = []
    for player in players:
        found: dict[int, Digests] = {}
        if player is not None:
            found[player.start] = digests(player.state)

            def keep(step: int, stepper: Stepper, found: dict[int, Digests] = found) -> None:
                found[step] = digests(stepper.state())

            player.play(last, after=keep)
        states.append(found)
    for number, run in enumerate(runs):
        for iteration, of_run in saved[number].items():
            if iteration in states[number]:
                differ = unequal(states[number][iteration], of_run)
                rows.append(
                    (f"{run.name}: replay against its checkpoint after step {iteration}", _named(differ))
                )
    common = sorted({*states[0]} & {*states[1]})
    for step in common:
        differ = unequal(states[0][step], states[1][step])
        if differ:
            when = f"after step {step}" if step else "before the first step"
            return Result(
                "steps",
                f"the states first differ {when}: {_named(differ)}",
                (f"step {step}",),
                tuple(rows),
                replays=2,
            )
    text = f"the replayed states of {len(common)} steps are equal to the bit: settings and data give one result here"
    if players[1] is None:
        text = "the other run cannot be replayed here; only checkpoints were compared"
    return Result("steps", text, (), tuple(rows), replays=2 if players[1] else 1)


def _named(names: list[str]) -> str:
    if not names:
        return "equal"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more} differ"

"""Faults of a GRPO study: killed and resumed, damaged checkpoints, changed problems, no space. Its model is tiny."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from tests.faults.harness import Bench, CannotDoError, fault, outcome
from tests.faults.storage import on_small_disk
from tests.faults.workplace import Workplace, wait_for
from tests.grpo import tiny

SAME = "`make` continues from the checkpoint and ends at the undisturbed numbers, responses and weights"
PREVIOUS = "passed over for the one before, named in the report; ends at the undisturbed numbers"
CHANGED = (
    "the run is refused by name, and nothing is lost: with the former file it ends at the undisturbed numbers"
)
NO_SPACE = "refused before the first run, with what is needed and what there is"


class GrpoWorkplace(Workplace):
    """A GRPO study of one run of 30 steps."""

    name, spec = "grpo-gsm8k", "grpo-gsm8k"
    settings = tiny.SETTINGS | {
        "VARIANTS": "B+AQN=strong",
        "GPT2_MAX_ITERS": "30",
        "GRPO_EVALUATE_STEPS": "10",
    }

    def run_dir(self, name: str = "B+AQN=strong.0") -> Path:
        return super().run_dir(name)

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = self.run_dir().glob("checkpoint/checkpoint-*/SHA256SUMS")
        return sorted((path.parent for path in found), key=lambda path: int(path.name.rpartition("-")[2]))

    def kill_after_checkpoint(self, bench: Bench, least: int = 1) -> None:
        """Start the study, and send SIGKILL to all its processes once it has a new complete checkpoint."""
        before, process = self.complete()[-1:], self.start()
        wait_for(
            lambda: (
                process.poll() is not None
                or (len(self.complete()) >= least and self.complete()[-1:] != before)
            )
        )
        assert process.poll() is None, process.communicate()[0]
        bench.kill_all(self, process)


def place(bench: Bench, **changes: str) -> GrpoWorkplace:
    """Return a new folder with the tiny model and its problems."""
    folder = bench.folder / "grpo"
    if not folder.exists():
        tiny.main(folder)
    made = GrpoWorkplace(
        bench.folder / f"grpo-{len(list(bench.folder.glob('grpo-*')))}", bench.texts, **changes
    )
    shutil.copytree(folder, made.folder, dirs_exist_ok=True)
    return made


@functools.cache
def undisturbed(bench: Bench) -> dict[str, Any]:
    study = place(bench)
    done = study.command("scripts.study")
    assert done.returncode == 0, done.stdout
    return tiny.files_of(study.run_dir())


@fault("SIGKILL to a GRPO study and its run, twice", SAME)
def killed(bench: Bench) -> str:
    study = place(bench)
    for _ in range(2):
        study.kill_after_checkpoint(bench)
    kept = (study.run_dir() / "metrics.jsonl").read_bytes().splitlines()[1]  # the first step, with its time
    done = study.command("scripts.study")
    resumed = kept in (study.run_dir() / "metrics.jsonl").read_bytes()
    same = done.returncode == 0 and tiny.files_of(study.run_dir()) == undisturbed(bench)
    return outcome(resumed and same, SAME, f"resumed {resumed} same {same} {done.stdout[-300:]}")


@fault("a flipped bit in the newest checkpoint of a GRPO run", PREVIOUS)
def flipped(bench: Bench) -> str:
    study = place(bench)
    study.kill_after_checkpoint(bench, least=2)
    harmed = study.complete()[-1]
    tiny.flip(harmed / "optimizer.pt")
    done = study.command("scripts.study")
    named = f"{harmed.name} is damaged: optimizer.pt" in (study.study / "report.md").read_text()
    same = done.returncode == 0 and tiny.files_of(study.run_dir()) == undisturbed(bench)
    return outcome(named and same, PREVIOUS, f"named {named} same {same} {done.stdout[-300:]}")


@fault("a training problem of an interrupted GRPO study is changed", CHANGED)
def changed_problem(bench: Bench) -> str:
    study = place(bench)
    study.kill_after_checkpoint(bench)
    problems = study.folder / "train.jsonl"
    former = problems.read_text()
    problems.write_text(former.replace("#### 4", "#### 5", 1))
    refused = study.command("scripts.study")
    named = refused.returncode == 1 and "was started with another data, so it cannot resume" in refused.stdout
    problems.write_text(former)
    done = study.command("scripts.study")
    same = done.returncode == 0 and tiny.files_of(study.run_dir()) == undisturbed(bench)
    return outcome(
        named and same, CHANGED, f"named {named} same {same} {refused.stdout[-300:]} {done.stdout[-300:]}"
    )


@fault("too little space for a GRPO study", NO_SPACE)
def too_small(bench: Bench) -> str:
    study = place(bench)
    done = study.command("scripts.study", prefix=on_small_disk(study, 30))
    if done.returncode == 77:
        raise CannotDoError("no file system can be mounted here")
    good = done.returncode == 1 and "of free space; 1 runs need about" in done.stdout and not study.steps()
    return outcome(good, NO_SPACE, done.stdout[-400:])

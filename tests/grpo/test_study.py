"""A GRPO study of a tiny random Qwen2 by `make`: noise, kill and resume, its files and page; divergence; refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo.rollout import DivergedError
from grpo.train import GrpoRun, problem_order
from runtime import run_plan
from runtime.dotconfig import ConfigError, read_symbols, read_text
from runtime.errors import UserError
from runtime.run_record import altered, load
from runtime.signals import Stop
from study import kconfig_commands as commands
from study import preconditions
from study.runs import read_runs
from study.study import Study
from tests.checkout import link_project
from tests.grpo.tiny import SETTINGS, files_of, flip, write_model, write_problems

PATIENCE_SECONDS = 600.0


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with problems and a model. 18 problems at 4 a step are 4 steps an epoch."""
    folder = tmp_path_factory.mktemp("parts")
    texts = [
        write_problems(folder / f"{name}.jsonl", count).read_text()
        for name, count in (("train", 18), ("test", 9))
    ]
    write_model(folder / "model", texts)
    return folder


@pytest.fixture
def place(tmp_path: Path, parts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the project, a model and problems."""
    link_project(tmp_path)
    for path in parts.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(**changes: str) -> Study:
    values = SETTINGS | changes
    commands.main(
        ["defconfig", "grpo-gsm8k", *(f"CONFIG_{name}={text}" for name, text in values.items())], {}
    )
    return Study(read_symbols(Path(".config")), read_text(Path(".config")))


def make(command: str, *words: str, until: Path | None = None) -> tuple[int, str]:
    """Run a command. until: a metrics.jsonl, after whose first step it is asked to stop."""
    arguments = [sys.executable, "-m", f"scripts.{command}", *words]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while until and process.poll() is None:
        if until.exists() and '"train"' in until.read_text():
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.1)
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, printed


def a_run(arm: str, study: Study, **settings: Any) -> GrpoRun:
    """Return a run of the study in this process. settings: other values of its configuration."""
    plan = study.plan_run(study.make_plan(), arm, 0)
    plan = plan.replace(settings=replace(plan.settings, **settings))
    run_dir = study.runs.folder(arm, 0)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config").write_bytes(Path(".config").read_bytes())
    run_plan.write(run_dir, plan)
    return GrpoRun(run_dir, plan, study.resolved, Stop())


@pytest.mark.slow
@pytest.mark.usefixtures("place", "one_thread")
def test_a_run_that_fails_and_is_interrupted_ends_with_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = configure(STUDY_NAME="first", GPT2_MAX_ITERS="6", GRPO_EVALUATE_STEPS="3")
    assert [a_run(arm, first).run() for arm in ("B", "B+AQN=strong")] == ["finished"] * 2
    plain, whole = (files_of(first.runs.folder(arm, 0)) for arm in ("B", "B+AQN=strong"))
    assert set(whole) - {"metrics", "rows", "model"} == {
        *(f"train-{step:05}.jsonl.gz" for step in range(1, 7)), *(f"test-{step:05}.jsonl.gz" for step in (0, 3, 6))
    }  # fmt: skip
    # the first interval has no noise, so the arms are equal there; at the second step they differ
    assert plain["train-00001.jsonl.gz"] == whole["train-00001.jsonl.gz"]
    assert plain["train-00002.jsonl.gz"] != whole["train-00002.jsonl.gz"]

    second = configure(STUDY_NAME="second", GPT2_MAX_ITERS="6", GRPO_EVALUATE_STEPS="3")
    after_step, make_trainer, resumed = GrpoRun.after_step, GrpoRun.make_trainer, list[int]()
    monkeypatch.setattr(
        GrpoRun, "make_trainer", lambda run: (resumed.append(run.iteration), make_trainer(run))[1]
    )

    def until(step: int, error: Exception | None) -> None:
        """Let the next run end at a step: by an error before its checkpoint, or by a request to stop."""

        def ended(run: GrpoRun, line: dict[str, Any]) -> None:
            after_step(run, line)
            if run.iteration == step:
                run.stop.requested = "a request to stop"
                if error:
                    raise error

        monkeypatch.setattr(GrpoRun, "after_step", ended)

    until(3, OSError("the disk"))
    run = a_run("B+AQN=strong", second, checkpoint_seconds=0)
    with pytest.raises(OSError, match="the disk"):
        run.run()
    assert (load(run.run_dir).status, load(run.run_dir).error) == ("failed", "OSError: the disk")
    torn = run.run_dir / "checkpoint/checkpoint-9"  # a checkpoint that was not written to its end is not used
    torn.mkdir()
    (torn / "trainer_state.json").write_text("{")
    flip(run.run_dir / "checkpoint/checkpoint-2/optimizer.pt")
    until(4, None)  # noticed at the end of the next step
    assert a_run("B+AQN=strong", second).run() == "interrupted"
    until(0, None)
    last = a_run("B+AQN=strong", second)
    assert last.run() == "finished"
    (note,) = last.log.record["notes"]
    assert "checkpoint-2 is damaged: optimizer.pt: SHA-256 is" in note
    assert resumed == [0, 1, 5]  # of the fresh run, after the error, after the request to stop
    assert files_of(run.run_dir) == whole
    assert not (run.run_dir / "checkpoint").exists()
    flip(run.run_dir / "model/model.safetensors")
    assert [run.why_not for run in read_runs(second.directory)] == [""]  # a report reads no weights
    assert [text.partition(":")[0] for text in altered(load(run.run_dir), run.run_dir)] == [
        "model/model.safetensors"
    ]


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_diverges_ends_and_is_counted_as_that(place: Path) -> None:
    weights = load_file(place / "model/model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    broken = place / "broken"
    broken.mkdir()
    for path in (place / "model").iterdir():
        if path.name != "model.safetensors":
            (broken / path.name).write_bytes(path.read_bytes())
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    study = configure(GRPO_MODEL="./broken")
    with pytest.raises(DivergedError):
        a_run("B", study).run()
    (run,) = read_runs(study.directory)
    assert (run.used, run.cause) == (False, "diverged")
    assert run.record.error == "DivergedError: after 0 steps: a logit of the rollout is nan"


@pytest.mark.slow
def test_make_trains_a_study_is_stopped_and_continues_and_every_command_knows_it(place: Path) -> None:
    configure(GPT2_MAX_ITERS="8", GRPO_EVALUATE_STEPS="4")
    run_dir = place / "results/grpo-gsm8k/runs/B0"
    status, printed = make("study", until=run_dir / "metrics.jsonl")
    assert (status, load(run_dir).status) == (130, "interrupted"), printed
    for command, line in (
        ("study", "report: results/grpo-gsm8k/report.html"),
        ("status", "progress  validation  to B "),
        ("verify", "all 4 agree"),
        ("report", "B+AQN=strong (primary): cannot tell"),
        ("plan", "2 runs x 8 steps x 16 responses"),
        ("evaluate results/grpo-gsm8k/runs/B0 --platform int4", "difference [95 %]"),
        ("transfer results/grpo-gsm8k --platforms foreign:0.3", "accuracy on fp32"),
        ("sample results/grpo-gsm8k/runs/B0", "was trained by GRPO, and this command reads runs of GPT2"),
    ):
        status, printed = make(*command.split())
        assert (status, line in printed) == (int(command.startswith("sample")), True), printed
    report = json.loads((place / "results/grpo-gsm8k/report.json").read_text())
    assert [one["arm"] for one in report["arms"]] == ["B", "B+AQN=strong"]
    assert [max(abs(value) for value, _ in one["logp"]) > 0.01 for one in report["arms"]] == [False, True]


@pytest.mark.usefixtures("place")
def test_a_disk_that_cannot_hold_checkpoints_and_models_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "free_bytes", lambda path: 10 * 2**20)
    with pytest.raises(UserError, match="10 MiB of free space; 2 runs need about 65"):
        configure().run_pending()
    needed = preconditions.needed_bytes(28960, [], "grpo"), preconditions.needed_bytes(28960, [0] * 5, "grpo")
    assert needed == (0, (3 * 12 + 5 * 4) * 28960 + preconditions.SPARE_BYTES)


@pytest.mark.parametrize(
    ("changes", "files", "says"),
    [
        ({"GRPO_MODEL": "./none"}, {}, "CONFIG_GRPO_MODEL=./none is no folder with a model"),
        ({"GRPO_MODEL": "results"}, {"results/a": ""}, "results has no weights in *.safetensors"),
        ({"GRPO_TRAIN_FILE": "none.jsonl"}, {}, "none.jsonl does not exist; fix: CONFIG_GRPO_TRAIN_FILE="),
        ({"GRPO_TEST_FILE": "bad.jsonl"}, {"bad.jsonl": '{"text": "a"}'}, "bad.jsonl:1 has no question and answer"),
        ({"GRPO_MODEL": "results"}, {"results/a.safetensors": "x"}, "GRPO_MODEL=results is no folder with a model"),
        ({"EFFECTIVE_BATCH": "80"}, {}, "18 training problems are fewer than the 20 of a step"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_run_starts(
    changes: Mapping[str, str], files: Mapping[str, str], says: str, place: Path
) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    study = configure(**changes)
    with pytest.raises(UserError, match="fix: ") as raised:
        study.run_pending()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("CONFIG_VARIANTS=B B+AQN=wild", "there is no preset wild"),
        ("CONFIG_VARIANTS=B RAALL", "has RAALL, and GRPO trains its model alone"),
        ("CONFIG_GRPO_GROUP=7", "does not divide the CONFIG_EFFECTIVE_BATCH=1024 responses of a step"),
        ("CONFIG_GPT2_MAX_TIME=60", "and CONFIG_GRPO=y exclude each other; fix: CONFIG_GPT2_MAX_TIME=0"),
        ("CONFIG_CONTINUES=results/x", "and CONFIG_GRPO=y exclude each other"),
        ("CONFIG_GRPO_GROUP=1", "out of range"),
    ],
)
def test_a_wrong_value_is_one_line_and_no_config_is_written(
    assignment: str, says: str, elsewhere: Path
) -> None:
    with pytest.raises(ConfigError, match="fix: ") as raised:
        commands.main(["defconfig", "grpo-gsm8k", assignment], {})
    assert says in str(raised.value)
    assert not (elsewhere / ".config").exists()


def test_the_problems_of_a_seed_are_permutations_cut_to_full_steps() -> None:
    order = problem_order(18, 10, 4, seed=3)
    assert len(order) == 40
    assert len({*order[:16]}) == len({*order[16:32]}) == 16
    assert order[:16] != order[16:32]
    assert order == problem_order(18, 10, 4, seed=3)[:40] != problem_order(18, 10, 4, seed=4)

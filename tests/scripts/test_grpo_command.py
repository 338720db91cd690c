"""`make grpo` with a tiny random Qwen2: noise, kill and resume, rewards, page; divergence; and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo import records
from grpo.grpo_settings import GrpoSettings
from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from runtime.signals import Stop
from scripts.grpo import main
from study import grpo_study as study
from study import kconfig_commands as commands
from tests.checkout import link_project
from tests.grpo.tiny import write_model, write_problems

TINY = {
    "GRPO_ARMS": "baseline strong", "SEEDS": "1", "GRPO_PROMPTS": "4", "GRPO_GROUP": "4", "GRPO_MICRO_BATCH": "8",
    "GRPO_RESPONSE_TOKENS": "8", "GRPO_EPOCHS": "3", "GRPO_MAX_STEPS": "10", "GRPO_EVALUATE_STEPS": "5",
    "GRPO_CHECKPOINT_STEPS": "3", "GRPO_LEARNING_RATE": "1e-3", "CPU_THREADS": "1", "GRPO_TRAIN_FILE": "train.jsonl",
    "GRPO_TEST_FILE": "test.jsonl", "GRPO_MODEL": "./model",
}  # fmt: skip
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


class Place:
    """A folder with the project, a model and problems, where commands run."""

    def __init__(self, folder: Path, parts: Path) -> None:
        self.folder = folder
        link_project(folder)
        for path in parts.iterdir():
            (folder / path.name).symlink_to(path)

    def configure(self, **changes: str) -> GrpoSettings:
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            values = TINY | changes
            commands.main(
                ["defconfig", "grpo-gsm8k", *(f"CONFIG_{name}={text}" for name, text in values.items())], {}
            )
            return GrpoSettings.from_symbols(read_symbols(Path(".config")))
        finally:
            os.chdir(here)

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        environment = {name: text for name, text in os.environ.items() if name != "MAKEFLAGS"}
        return subprocess.Popen(
            [sys.executable, "-m", *(arguments or ("scripts.grpo",))], cwd=self.folder, env=environment | extra,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, **extra: str) -> tuple[int, str]:
        process = self.start(*arguments, **extra)
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, printed

    def here(self, *run: str) -> str:
        """Run `make grpo` with its runs in this process, without the seconds in which a process loads TRL.

        run: .config, arm and seed of the only run. Returns the output.
        """
        from grpo.worker import GrpoRun

        def child(config: Path, arm: str, seed: int) -> int:
            assert GrpoRun(GrpoSettings.from_symbols(read_symbols(config)), arm, seed, Stop(), print).run()
            return 0

        output, threads = io.StringIO(), torch.get_num_threads()
        with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(study, "_child", child)
            patch.setattr(sys, "argv", ["grpo"])
            patch.delenv("MAKEFLAGS", raising=False)
            if run:
                child(Path(run[0]), run[1], int(run[2]))
            else:
                main()
        torch.set_num_threads(threads)
        return output.getvalue()

    def stop_at(self, text: str, number: signal.Signals, *arguments: str) -> tuple[int, str]:
        """Send a signal to the command when it prints `text`."""
        process = self.start(*arguments)
        assert process.stdout
        printed = ""
        for line in process.stdout:
            printed += line
            if text in line:
                process.send_signal(number)
                break
        printed += process.communicate(timeout=PATIENCE_SECONDS)[0]
        return process.returncode, printed


@pytest.fixture
def place(tmp_path: Path, parts: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("RA_DETECTED", "cpu")
    return Place(tmp_path, parts)


def files_of(run_dir: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on interruptions."""
    paths = [
        run_dir / "metrics.jsonl",
        *(run_dir / "responses").iterdir(),
        run_dir / "model/model.safetensors",
    ]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.slow
def test_a_study_ends_with_a_page_and_interrupted_runs_end_with_the_same_numbers(place: Place) -> None:
    first = place.configure(STUDY_NAME="first")
    printed = place.here()
    assert "step 10/10: accuracy" in printed
    assert "over 0.01; noise 0.1 in the rollout" in printed
    assert "responses are recorded with their rewards" in printed
    folder = place.folder / "results/first"
    baseline, strong = (files_of(folder / f"runs/{name}") for name in ("baseline0", "strong0"))
    names = {f"train-{step:05}.jsonl.gz" for step in range(1, 11)} | {
        f"test-{step:05}.jsonl.gz" for step in (0, 5, 10)
    }
    assert set(baseline) == set(strong) == names | {"metrics.jsonl", "model.safetensors"}
    # the first interval has no noise, so the arms are equal there; at the second step they differ
    assert baseline["train-00001.jsonl.gz"] == strong["train-00001.jsonl.gz"]
    assert baseline["train-00002.jsonl.gz"] != strong["train-00002.jsonl.gz"]
    report = json.loads((folder / "grpo.json").read_text())
    assert [arm["word"] for arm in report["arms"]] == ["", "cannot tell"]
    assert report["responses"] == 2 * (10 * 16 + 3 * 9)
    assert report["problems"] == []
    assert report["arms"][0]["logp"]["over"] == 0
    assert report["arms"][1]["logp"]["over"] > 0
    assert not (folder / "runs/strong0/checkpoints").exists()

    # killed in the second epoch, two steps after a checkpoint
    second = place.configure(STUDY_NAME="second")
    assert second.identity("x") == first.identity("x")
    run_dir = place.folder / "results/second/runs/strong0"
    run_dir.mkdir(parents=True)
    (run_dir / "config").write_bytes((place.folder / ".config").read_bytes())
    child = ("results/second/runs/strong0/config", "strong", "0")
    status, printed = place.stop_at("step 8/10", signal.SIGKILL, "grpo.worker", *child)
    assert status == -signal.SIGKILL, printed
    record = records.read(run_dir)
    assert record
    assert record.status == "running"
    torn = run_dir / "checkpoints/checkpoint-9"  # a checkpoint that was not written to its end is not used
    torn.mkdir()
    (torn / "trainer_state.json").write_text("{")
    printed = place.here(*child)
    assert "step 7/10" in printed
    assert "step 6/10" not in printed
    assert files_of(run_dir) == strong

    # asked to stop: the step ends, a checkpoint is written, and make grpo continues
    status, printed = place.stop_at("step 2/10", signal.SIGTERM)
    assert status == 130, printed
    assert printed.endswith("stopped\n")
    record = records.read(place.folder / "results/second/runs/baseline0")
    assert record
    assert (record.status, record.step in (2, 3)) == ("interrupted", True)
    status, printed = place.run()
    assert status == 0, printed
    assert f"baseline0, interrupted at step {record.step}" in printed
    assert f"step {record.step}/10" not in printed
    assert files_of(place.folder / "results/second/runs/baseline0") == baseline
    status, printed = place.run("scripts.report", "results/second")
    assert (status, "results/second is a GRPO study; fix: make grpo" in printed) == (1, True)
    before = {path: path.stat().st_mtime_ns for path in (place.folder / "results/second/runs").rglob("*")}
    printed = place.here()
    assert "step" not in printed.partition("GRPO with noise")[0]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_diverges_ends_and_is_counted_as_that(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    from grpo.worker import GrpoRun

    weights = load_file(place.folder / "model/model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    broken = place.folder / "broken"
    broken.mkdir()
    for path in (place.folder / "model").iterdir():
        if path.name != "model.safetensors":
            (broken / path.name).write_bytes(path.read_bytes())
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    settings = place.configure(GRPO_MODEL="./broken")
    monkeypatch.chdir(place.folder)
    for arm in settings.arms:
        settings.run_dir(arm, 0).mkdir(parents=True)
        (settings.run_dir(arm, 0) / "config").write_bytes(Path(".config").read_bytes())
        assert GrpoRun(settings, arm, 0, Stop(), print).run() == "diverged"
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    main()  # both runs ended: it repeats none
    printed = capsys.readouterr().out
    assert "strong, seed 0: step 1: a logit of the rollout is nan" in printed
    assert "strong: 1 of 1 runs diverged; not judged." in printed
    report = json.loads((settings.folder / "grpo.json").read_text())
    assert all(arm["final"] == {} and arm["trajectory"] == [] for arm in report["arms"])


@pytest.mark.parametrize(
    ("changes", "files", "says"),
    [
        ({"GRPO_MODEL": "./none"}, {}, "CONFIG_GRPO_MODEL=./none does not exist"),
        ({"GRPO_TEST_FILE": "bad.jsonl"}, {"bad.jsonl": '{"text": "a"}'}, "bad.jsonl:1 has no question and answer"),
        ({"GRPO_PROMPTS": "20"}, {}, "18 training problems are fewer than CONFIG_GRPO_PROMPTS=20"),
        ({}, {"results/grpo-gsm8k/runs/strong0/run.json": "{"}, "fix: move"),
        ({"GRPO": "n", "GRPO_MODEL": ""}, {}, ".config is of no GRPO study; fix: make defconfig-grpo-gsm8k"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_run_starts(
    changes: Mapping[str, str],
    files: Mapping[str, str],
    says: str,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        path = place.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if "GRPO" in changes:
        monkeypatch.chdir(place.folder)
        commands.main(["defconfig", "gpt2-ra-ablation-smoke"], {})
    else:
        place.configure(**changes)
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    with pytest.raises(UserError, match="fix: ") as raised:
        main()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(place.folder.glob("results/*/runs/*/metrics.jsonl"))


def test_make_refuses_a_config_of_grpo_and_other_settings_need_another_name(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = place.configure()
    monkeypatch.chdir(place.folder)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    from scripts.study import load

    with pytest.raises(UserError, match=r"\.config is of a GRPO study \(CONFIG_GRPO=y\); fix: make grpo"):
        load()
    run_dir = settings.run_dir("strong", 0)
    run_dir.mkdir(parents=True)
    records.write(
        run_dir,
        records.GrpoRecord("strong0", "strong", 0, "finished", None, "another", "m", "w", 10, 10, 4, 1.0, {}),
    )
    monkeypatch.setattr(sys, "argv", ["grpo"])
    with pytest.raises(UserError, match=r"has other settings, problems or model than \.config; fix: another"):
        main()

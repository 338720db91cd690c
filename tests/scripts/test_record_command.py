"""`make record` replays a step of a run to the bit, records it, and leaves the run's folder as it is."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt2.training_step import NotFiniteError
from ra import arms
from runtime import run_record
from runtime.errors import UserError
from runtime.signals import Stop
from scripts import record as command
from study.evaluation import loaded_runs
from tests import small_runs
from tests.checked_files import write_checked
from tests.scripts import faulty_runs
from tests.scripts.faulty_runs import ROOT, STEPS, workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the project and texts, in which the tests run."""
    with workplace(tmp_path_factory.mktemp("place")) as folder:
        yield folder


def train(name: str, stop: Stop | None = None, **settings: Any) -> Path:
    """Train a run as scripts.train does. Returns its folder."""
    return faulty_runs.train(name, f"study{len(list(Path('results').glob('*')))}", stop, **settings)


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    return train("B")


def record(monkeypatch: pytest.MonkeyPatch, **given: Any) -> int:
    monkeypatch.setattr(
        "sys.argv", ["scripts.record", *(f"--{name}={value}" for name, value in given.items())]
    )
    return command.main()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def dump(step: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((step / "rank0/dump.json").read_text())
    return found


def test_a_step_is_replayed_from_the_start_to_the_bit(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(finished)
    assert record(monkeypatch, run=finished, step=4) == 0
    printed = capsys.readouterr()
    assert "B0: step 4 of 6, from the start: 3 steps before it" in printed.out
    assert (
        "exact: 4 of 4 replayed steps equal metrics.jsonl in loss and gradient norm, to the bit"
        in printed.out
    )
    step = finished.parents[1] / "records/B0/step4"
    assert f"make compare-records A=OTHER/step4 B={step}" in printed.out
    assert content(finished) == before
    data = dump(step)["data"]
    assert "Module.blocks.0.attention.qkv.ExpandLinear.forward.1" in data  # the second micro-batch
    assert "Module.blocks.0.attention.qkv.ExpandLinear.forward.2" not in data
    assert "Module.blocks.1.mlp.fc.ExpandLinear.parameters_grad.0" in data


def test_a_checkpoint_before_the_step_shortens_the_replay(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train("RALEARN", small_runs.StopAfter(4), GPT2_DROPOUT="0.1")
    assert record(monkeypatch, run=run_dir, step=4, level="L0", task="tensor") == 0
    first = capsys.readouterr().out
    taken = int(first.partition("from the checkpoint at ")[2].partition(":")[0] or 0)
    assert 0 < taken < 4, first
    step = run_dir.parents[1] / "records/RALEARN0/step4"
    (step / "rank0/stack.json").unlink()  # it has the line of this test
    from_checkpoint = content(step)
    for path in run_dir.glob("checkpoint/*/state.pt"):
        path.write_bytes(b"damaged")
    assert record(monkeypatch, run=run_dir, step=4, level="L0", task="tensor") == 0
    printed = capsys.readouterr().out
    assert "not used: checkpoint " in printed
    assert "from the start: 3 steps before it" in printed
    (step / "rank0/stack.json").unlink()
    assert content(step) == from_checkpoint
    assert record(monkeypatch, run=run_dir, step=STEPS) == 0  # the run ended before it
    assert "exact: " in capsys.readouterr().out


def test_other_numbers_are_named_with_both_values_and_noted_in_the_record(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_of(finished, tmp_path)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    steps = [json.loads(line) for line in lines]
    changed = next(line for line in steps if line["event"] == "train" and line["iteration"] == 2)
    logged = changed["loss"]
    changed["loss"] = logged + 1e-6
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert record(monkeypatch, run=run_dir, step=3, out=tmp_path / "out", task="hash") == 1
    printed = capsys.readouterr()
    assert (
        f"not exact: step 2 differs from the run: loss {logged!r} here, {logged + 1e-6!r} in" in printed.err
    )
    found = dump(tmp_path / "out/step3")
    assert found["notes"][0].startswith("step 2 differs from the run: loss ")
    assert any("md5" in entry for row in found["data"].values() for entry in row.get("output", []) if entry)


def copy_of(run_dir: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run_dir, folder / "study/runs" / run_dir.name))


def test_a_step_whose_loss_is_not_finite_is_recorded(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpt2 import training_step as training

    rate = training.Stepper.rate

    def overflow(self: training.Stepper, iteration: int, iterations: int) -> float:
        if iteration == 2:
            raise NotFiniteError("iteration 2: loss nan, gradient norm inf; fix: another rate")
        return rate(self, iteration, iterations)

    monkeypatch.setattr(training.Stepper, "rate", overflow)
    assert record(monkeypatch, run=finished, step=3, out=tmp_path) == 0
    assert "iteration 2: loss nan, gradient norm inf\n" in capsys.readouterr().out
    assert "Module.blocks.0.Block.backward.0" in dump(tmp_path / "step3")["data"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": ""}, "RUN is missing; fix: make record RUN=results"),
        ({"run": "results"}, "run.json"),
        ({"step": "x"}, "STEP=x is not a step number"),
        ({"step": "0"}, "STEP=0 is not a step of B0; fix: STEP=1 .. 6"),
        ({"task": "all"}, "TASK=all is unknown; fix: use statistics, tensor, hash"),
        ({"out": "INSIDE"}, "is in the run's folder"),
    ],
)
def test_a_wrong_variable_is_one_line(
    given: dict[str, str], message: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(Path("results"))
    given = {name: str(finished / "records") if value == "INSIDE" else value for name, value in given.items()}
    with pytest.raises(UserError) as caught:
        record(monkeypatch, **({"run": str(finished), "step": "3"} | given))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(Path("results")) == before


CUSTOM = """
from gpt2.transformer import CausalSelfAttention


class Scaled(CausalSelfAttention):
    def forward(self, x):
        return super().forward(x) * {factor}


def attention(layer, spec):
    return Scaled(spec.width, spec.heads, spec.dropout)
"""


def test_a_custom_variant_is_replayed_and_its_changed_or_missing_source_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path)
    monkeypatch.setattr("ra.custom.__path__", [str(tmp_path)])
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    source = tmp_path / "scaled.py"
    source.write_text(CUSTOM.format(factor=1.0))
    run_dir = train("SCALED")
    assert record(monkeypatch, run=run_dir, step=2) == 0
    copy = run_dir.parents[1] / "own/scaled.py"
    copy.parent.mkdir()
    shutil.copy(source, copy)
    source.write_text(CUSTOM.format(factor=1.5))
    sys.modules.pop("ra.custom.scaled")
    assert record(monkeypatch, run=run_dir, step=2) == 1
    message = capsys.readouterr().err
    assert "not exact: step 1 differs" in message
    assert "ra.custom.scaled" in message
    source.unlink()
    sys.modules.pop("ra.custom.scaled")
    with pytest.raises(
        UserError, match=r"needs ra/custom/scaled.py, which does not exist; fix: copy .*own/scaled"
    ):
        record(monkeypatch, run=run_dir, step=2)


@pytest.mark.parametrize("fault", ["plan", "data"])
def test_another_plan_and_other_data_are_refused(
    fault: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = copy_of(finished, tmp_path)
    if fault == "plan":
        text = (run_dir / "plan.json").read_text()
        (run_dir / "plan.json").write_text(text.replace('"learning_rate": 0.001', '"learning_rate": 0.002'))
    else:
        content = json.loads((run_dir / "run.json").read_text())
        content["fingerprint"]["data"] = "other"
        write_checked(run_dir / "run.json", content)
    with pytest.raises(UserError, match="plan.json was altered" if fault == "plan" else "another data"):
        record(monkeypatch, run=run_dir, step=1)


def test_the_process_restarts_with_the_environment_of_the_run(finished: Path, tmp_path: Path) -> None:
    run_dir = copy_of(finished, tmp_path)
    content = json.loads((run_dir / "run.json").read_text())
    content["environment"]["variables"] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    write_checked(run_dir / "run.json", content)
    environment = run_record.load(run_dir)
    found = loaded_runs.run_environment(environment)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.record", f"--run={run_dir}", "--step=1", f"--out={tmp_path / 'out'}"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "exact: 1 of 1 replayed steps" in done.stdout

"""`make repeat` repeats a step of a run, names an injected fault, and leaves the run's folder as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.artifacts import run_record
from gpt2.config.batch import plan_batch
from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols
from gpt2.hardware import attention_kernels
from gpt2.model import transformer
from gpt2.system.errors import UserError
from gpt2.system.signals import Stop
from gpt2.train.run_plan import RunPlan
from gpt2.train.trainer import TrainingRun
from ra.settings import AlternationSettings
from ra.variants import variant
from scripts.repeat import __main__ as command
from tests import small_runs
from tests.checkout import link_project
from tests.kconfig_commands import run as configure

STEPS = 3
SETTINGS = {
    "GPT2_MAX_ITERS": STEPS, "GPT2_BLOCK_SIZE": 16, "EFFECTIVE_BATCH": 4, "MICRO_BATCH": 2, "EVAL_TOKENS": 64,
    "HELLASWAG": "n", "TOKENIZER_BYTES": "y", "DATASET_FILES": "texts/*.txt", "CPU_THREADS": 1, "GPT2_DROPOUT": "0.1",
}  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in a folder in which the tests run."""
    folder, patch = tmp_path_factory.mktemp("place"), pytest.MonkeyPatch()
    link_project(folder)
    small_runs.write_texts(folder / "texts")
    patch.chdir(folder)
    patch.setenv("RA_DETECTED", "cpu")
    patch.delenv("MAKEFLAGS", raising=False)
    threads = torch.get_num_threads()
    configure(
        "defconfig",
        "gpt2-ra-ablation-smoke+cpu",
        *(f"CONFIG_{name}={value}" for name, value in SETTINGS.items()),
    )
    symbols = read_symbols(".config")
    config = Config.from_symbols(symbols)
    made = folder / "results/study/runs" / run_record.run_name("B", 0)
    made.mkdir(parents=True)
    (made / "config").write_text(Path(".config").read_text())
    resolved = attention_kernels.prepare_device(config.target, config.model)
    plan = RunPlan(made, made.name, "B", 0, STEPS, plan_batch(4, 2, 1, 16))
    parts = variant("B", config.model, AlternationSettings.from_symbols(symbols)).parts
    with attention_kernels.attention_context(resolved, config.model.dropout):
        TrainingRun(plan, config, resolved, parts, Stop()).train()
    yield made
    torch.set_num_threads(threads)
    patch.undo()


def repeat(monkeypatch: pytest.MonkeyPatch, **given: Any) -> int:
    monkeypatch.setattr(
        "sys.argv", ["scripts.repeat", *(f"--{name}={value}" for name, value in given.items())]
    )
    return command.main()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_step_of_a_run_is_reproducible_in_fresh_processes_as_well(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run_dir)
    monkeypatch.setattr("numerics.repeat.processes.FRESH_PROCESSES", 1)
    assert repeat(monkeypatch, run=run_dir, step=3, times=2) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 replayed steps equal metrics.jsonl in loss and gradient norm, to the bit" in printed
    found = json.loads((run_dir.parents[1] / "repeat/B0/step3/repeat.json").read_text())
    assert found["fault"] is False
    conditions = {name: (row["repetitions"], row["different"]) for name, row in found["conditions"].items()}
    assert conditions["not observed"] == conditions["observed"] == (2, 1)
    assert conditions["fresh processes"] == (1, 1)
    assert found["operations"] > 100
    assert content(run_dir) == before


def test_an_injected_fault_is_named_with_its_module(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = transformer.MLP.forward

    def unwritten(self: Any, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(len(x) + 1, *x.shape[1:])
        buffer[:-1] = forward(self, x)
        return buffer.nan_to_num(1e-3, 1e-3, 1e-3).clamp(-1.0, 1.0).sum(0) * 1e-3 + buffer[:-1]

    monkeypatch.setattr(transformer.MLP, "forward", unwritten)
    monkeypatch.setattr("numerics.repeat.processes.FRESH_PROCESSES", 0)  # they lack the fault
    assert repeat(monkeypatch, run=run_dir, step=2, times=2, out=tmp_path) == 1
    found = json.loads((tmp_path / "repeat.json").read_text())
    assert found["conclusion"] == "uninitialised memory"
    assert found["findings"][0]["operation"]["place"] == "blocks.0.mlp"
    assert "not equal to the run: step 1 differs from the run" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": ""}, "RUN is missing; fix: make repeat RUN=results"),
        ({"run": "nowhere"}, "nowhere is not a folder"),
        ({"step": ""}, "STEP is missing"),
        ({"step": "x"}, "STEP=x is not a step number"),
        ({"step": "9"}, "STEP=9 is not a step of B0"),
        ({"times": "1"}, "TIMES=1 is not a number from 2 to 1000"),
        ({"times": "x"}, "TIMES=x is not a number from 2 to 1000"),
        ({"out": "INSIDE"}, "is in the run's folder"),
    ],
)
def test_a_wrong_variable_is_one_line(
    given: dict[str, str], message: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(run_dir)
    given = {name: str(run_dir / "repeat") if value == "INSIDE" else value for name, value in given.items()}
    with pytest.raises(UserError) as caught:
        repeat(monkeypatch, **({"run": str(run_dir), "step": "2"} | given))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(run_dir) == before

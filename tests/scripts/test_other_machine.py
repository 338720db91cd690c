"""Train here, evaluate on another machine (its device has another name and other arithmetic), judge here."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gpt2.platforms import Platform, on_platform, parse_platform
from runtime import run_record
from runtime.attention_kernels import prepare_device
from runtime.errors import UserError
from runtime.run_record import LaterEvaluation
from scripts.transfer import main
from study.evaluation import transfer_runs as evaluate
from study.evaluation.transfer_matrix import build_transfer, counted_runs, elsewhere, item_gap
from tests.faults.in_process import train
from tests.faults.workplace import STUDY, Workplace, write_stories
from tests.hellaswag_items import FIXTURE
from tests.shared_folder import data_folder

SETTINGS = {
    "SEEDS": "3",
    "GPT2_MAX_ITERS": "12",
    "MICRO_BATCH": "0",
    "EVAL_INTERVAL_TOKENS": "256",
    "HELLASWAG": "y",
    "HELLASWAG_FILE": str(FIXTURE),
}
NPU = "Ascend 910B3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    texts = write_stories(tmp_path_factory.mktemp("texts"))
    place = Workplace(tmp_path_factory.mktemp("place"), texts, DATA_DIR="data", **SETTINGS)
    shared = Path(data_folder()["DATA_DIR"])
    shared.mkdir(parents=True, exist_ok=True)
    (place.folder / "data").symlink_to(shared)
    assert train(place).returncode == 0
    return place


@pytest.fixture
def here(trained: Workplace, tmp_path: Path) -> Path:
    """A copy of the study, with the links to its data."""
    shutil.copytree(trained.folder, tmp_path / "here", symlinks=True)
    return tmp_path / "here" / "results" / STUDY


Transfer = Callable[..., str]


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Transfer:
    """Run `make transfer` in the folder of a study, on a machine whose device has that name; return what it prints."""

    def run(study: Path, *arguments: str, device: str = "") -> str:
        def prepare(*given: Any) -> Any:
            resolved = prepare_device(*given)
            return dataclasses.replace(resolved, device_name=device) if device else resolved

        def place(model: Any, platform: Platform, where: str, home: str) -> Any:
            return on_platform(model, parse_platform("foreign:0.3") if device else platform, where, home)

        monkeypatch.chdir(study.parents[1])
        monkeypatch.setattr(evaluate.attention_kernels, "prepare_device", prepare)
        monkeypatch.setattr(evaluate, "on_platform", place)
        monkeypatch.setattr(sys, "argv", ["transfer", str(study), *arguments])
        main()
        return capsys.readouterr().out

    return run


def results(study: Path, run: str = "B0") -> dict[str, LaterEvaluation]:
    folder = study / "runs" / run
    record = run_record.load(folder)
    read_all = [
        run_record.read_evaluation(path, record) for path in sorted((folder / "evaluations").glob("*/"))
    ]
    assert all(read_all)
    return {one.platform: one for one in read_all if one}


def same(one: LaterEvaluation, other: LaterEvaluation) -> bool:
    return (one.rows, one.about) == (other.rows, other.about)


def altered(found: LaterEvaluation, loss: float | None = None, **about: str) -> None:
    """Write an evaluation with another loss or other facts."""
    record = run_record.load(found.folder.parents[1])
    scored = [(row if loss is None else row.replace(value=loss), found.items(row)) for row in found.rows]
    run_record.write_evaluation(found.folder, record, scored, {**found.about, **about})


def copy_to(study: Path, folder: Path) -> Path:
    """Copy the study alone, without data and texts."""
    found = folder / "results" / STUDY
    shutil.copytree(study, found)
    return found


def test_trained_here_evaluated_there_judged_here(here: Path, transfer: Transfer, tmp_path: Path) -> None:
    transfer(here, "--platforms", "bf16")
    there = copy_to(here, tmp_path / "there")
    before = results(there)
    assert set(before) == {"fp32", "bf16"}
    printed = transfer(there, "--platforms", "bf16 fp32", "--machine", "npu910b", device=NPU)
    assert "bf16@npu910b" in printed
    found = results(there)
    assert set(found) == {"fp32", "bf16", "bf16@npu910b", "fp32@npu910b"}
    assert all(same(found[name], before[name]) for name in before)  # home is that of the machine of training
    assert found["fp32@npu910b"].about["device"] == NPU
    for run in ("B0", "B1", "B2"):
        shutil.copytree(
            there / "runs" / run / "evaluations", here / "runs" / run / "evaluations", dirs_exist_ok=True
        )
    transfer(here, "--platforms", "bf16 bf16@npu910b fp32@npu910b")
    content = json.loads((here / "transfer.json").read_text())
    assert content["platforms"] == ["fp32", "bf16", "bf16@npu910b", "fp32@npu910b"]
    losses = [row for row in content["matrix"] if row["metric"] == "loss"]
    rows = {(row["seed"], row["platform"]): row["value"] for row in losses}
    assert content["devices"]["bf16@npu910b"].startswith(NPU)
    assert content["devices"]["bf16"].startswith(content["device"])
    gaps = {one["platform"]: one["test"]["difference"]["mean"] for one in content["verdicts"]["gaps"]}
    expected = [rows[n, "bf16@npu910b"] - rows[n, "fp32"] for n in range(3)]
    assert gaps["bf16@npu910b"] == pytest.approx(sum(expected) / 3)
    assert abs(gaps["bf16@npu910b"]) > 10 * abs(gaps["bf16"])
    assert r"bf16\@npu910b: bfloat16, on npu910b (Ascend 910B3" in (here / "transfer.md").read_text()


def test_another_machine_needs_no_data_and_has_the_name_of_its_device(
    here: Path, transfer: Transfer, tmp_path: Path
) -> None:
    transfer(here, "--platforms", "bf16")
    there = copy_to(here, tmp_path / "there")
    transfer(there, "--platforms", "fp32", device=NPU)
    assert not (tmp_path / "there/data").exists()
    folder = there / "runs/B2"
    assert elsewhere(folder, run_record.load(folder)) == ["fp32@ascend-910b3"]
    with pytest.raises(UserError, match=r"is of Ascend 910B3; this machine is Other, .*fix: MACHINE="):
        transfer(there, "--platforms", "fp32", "--machine", "ascend-910b3", device="Other")
    transfer(there, "--platforms", "fp32", "--machine", "other", device="Other")
    assert elsewhere(folder, run_record.load(folder)) == ["fp32@ascend-910b3", "fp32@other"]


def test_home_is_never_taken_from_another_machine(here: Path, transfer: Transfer) -> None:
    transfer(here, "--platforms", "bf16")
    right = results(here)["fp32"]
    altered(right, loss=1.0, device=NPU)
    report = build_transfer([here], ["bf16"])
    assert "B0 on fp32" in report.missing
    assert not [row for row in report.matrix if row.seed == 0]
    transfer(here, "--platforms", "bf16")
    assert same(results(here)["fp32"], right)


def test_records_of_other_weights_or_of_two_machines_are_not_mixed(here: Path, transfer: Transfer) -> None:
    transfer(here, "--platforms", "bf16", "--machine", "x", device=NPU)
    transfer(here, "--platforms", "bf16")
    names = ["bf16", "bf16@x"]
    assert len([row for row in build_transfer([here], names).matrix if row.metric == "loss"]) == 9
    found = results(here, "B1")["bf16@x"]
    altered(found, weights="0" * 64)
    missing = ["B1 on bf16@x (its result is of other weights or another text)"]
    assert build_transfer([here], names).missing == missing
    altered(found, device="Ascend 310P")
    with pytest.raises(UserError, match=r"bf16@x is of Ascend 910B3, .* for B0, and of Ascend 310P, .*fix:"):
        build_transfer([here], names)
    shutil.rmtree(found.folder)
    shutil.copytree(found.folder.with_name("bf16"), found.folder)  # a renamed evaluation
    assert build_transfer([here], names).missing == ["B1 on bf16@x"]


def test_hellaswag_is_scored_on_every_platform_by_item(here: Path, transfer: Transfer) -> None:
    """Against the run's own score, numpy and scipy."""
    transfer(here, "--platforms", "int2 foreign:0 foreign:1")
    flips = 0
    for run in ("B0", "B1", "B2"):
        trained = np.load(here / "runs" / run / "items/acc_norm-hellaswag.npy")
        entry = run_record.load(here / "runs" / run).hellaswag
        home, same, found = (results(here, run)[name] for name in ("fp32", "foreign:0", "foreign:1"))
        accuracy = home.row("acc_norm")
        assert (accuracy.value, accuracy.data) == (entry.acc_norm, f"hellaswag@{entry.items_sha256[:12]}")
        before, after = (np.array(one.items(accuracy)) for one in (home, found))
        assert before.tolist() == trained.tolist()
        gap = item_gap(home, found)
        assert gap
        low, high = stats.t.interval(0.95, 11, (after - before).mean(), stats.sem(after - before))
        assert gap.difference.mean == pytest.approx((after - before).mean())
        if gap.flips:
            assert (gap.difference.low, gap.difference.high) == pytest.approx((low, high))
        assert gap.flips == (after != before).sum()
        flips += gap.flips
        zero = item_gap(home, same)
        assert zero
        assert (zero.difference.mean, zero.flips, zero.difference.count) == (0.0, 0, 12)
    assert flips > 0


def test_studies_of_another_recipe_are_refused(here: Path, tmp_path: Path) -> None:
    other = copy_to(here, tmp_path / "other")
    shutil.rmtree(here / "runs/B2")
    for name in ("B0", "B1"):
        shutil.rmtree(other / "runs" / name)
    assert len(counted_runs([here, other])) == 3
    folder = other / "runs/B2"
    record = run_record.load(folder)
    assert record.fingerprint
    run_record.write(folder, record.replace(fingerprint=record.fingerprint.replace(schedule="x")))
    with pytest.raises(UserError, match=r"runs/B2 differs in schedule from B0; fix: "):
        counted_runs([here, other])

"""`make evaluate`: a trained run on other platforms, its records, and what is refused."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import checkpoint, records, run_record
from study.evaluation.loaded_runs import load_run
from study.evaluation.transfer_matrix import gap, loss_of, read
from tests.checked_files import write_checked
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

SETTINGS = {"VARIANTS": "RALEARN", "GPT2_MAX_ITERS": "12", "MICRO_BATCH": "0", "EVAL_INTERVAL_TOKENS": "256"}
PLATFORMS = ["bf16", "int8", "int2", "foreign:0", "foreign:0.1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    texts = write_stories(tmp_path_factory.mktemp("texts"))
    place = Workplace(tmp_path_factory.mktemp("place"), texts, **SETTINGS)
    assert train(place).returncode == 0
    faulty_copies(place.study / "runs/RALEARN0", place.study)
    return place


def faulty_copies(run: Path, folder: Path) -> None:
    """Copies of a run that cannot be evaluated."""
    for name in ("unfinished", "bare", "wider", "torn"):
        shutil.copytree(run, folder / name)
    run_record.write(folder / "unfinished", run_record.load(run).replace(status="interrupted"))
    shutil.rmtree(folder / "bare/checkpoint")
    (folder / "empty").mkdir()
    found = checkpoint.load_latest(run / "checkpoint")
    assert found
    for name, tensor in found.state["model"].items():  # of another model
        found.state["model"][name] = tensor.repeat(2, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor
    shutil.rmtree(folder / "wider/checkpoint")
    checkpoint.save(folder / "wider/checkpoint", found.iteration, found.state, found.meta)
    for path in (folder / "torn/checkpoint").rglob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])


def evaluate(place: Workplace, platforms: str, run: str = "RALEARN0") -> tuple[int, str]:
    done = place.here("scripts.evaluate", str(place.study / "runs" / run), "--platform", platforms)
    return done.returncode, done.stdout


def test_a_run_is_evaluated_on_every_platform_and_its_files_are_unchanged(place: Workplace) -> None:
    folder = place.study / "runs/RALEARN0"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = place.command("scripts.evaluate", str(folder), "--platform", " ".join(PLATFORMS))
    printed = done.stdout
    assert done.returncode == 0, printed
    assert {path: path.read_bytes() for path in before} == before
    trained = run_record.load(folder)
    found = {name: read(folder, trained, name) for name in ["fp32", *PLATFORMS]}
    home = found["fp32"]
    assert loss_of(home).value == pytest.approx(
        trained.validation.loss, abs=1e-6
    )  # that of the end of training
    for name, result in found.items():
        loss = loss_of(result)
        assert result.about["weights"] == home.about["weights"], name
        assert math.fsum(result.items(loss)) / loss.items == pytest.approx(loss.value)
        assert f"{loss.value:.5f}" in printed
    zero, strong = found["foreign:0"], found["foreign:0.1"]
    assert zero.items(loss_of(zero)) == home.items(loss_of(home))
    difference = gap(home, strong)
    assert difference.mean == pytest.approx(loss_of(strong).value - loss_of(home).value)
    assert f"{difference.mean:+.5f}" in printed


def test_weights_of_another_iteration_are_refused(place: Workplace) -> None:
    folder = place.study / "other/RALEARN0"
    shutil.copytree(place.study / "runs/RALEARN0", folder)
    found = checkpoint.load_latest(folder / "checkpoint")
    assert found
    shutil.rmtree(folder / "checkpoint")
    checkpoint.save(folder / "checkpoint", 8, found.state, found.meta)
    status, printed = evaluate(place, "bf16", "../other/RALEARN0")
    assert status != 0
    assert "checkpoint has the weights of iteration 8; the run finished at 12; fix:" in printed


def test_an_existing_record_is_not_repeated_and_a_damaged_one_is(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "shift.py is the study's copy"
    status, printed = evaluate(place, "int3")
    assert (status, note in printed) == (0, False)
    path = place.study / "runs/RALEARN0/evaluations/int3/rows.jsonl"
    first, written = path.read_bytes(), path.stat().st_mtime_ns
    monkeypatch.setattr(
        "study.evaluation.transfer_runs.load_run", lambda folder: replace(load_run(folder), notes=[note])
    )
    status, printed = evaluate(place, "int3")
    assert (status, f"RALEARN0: {note}" in printed) == (0, True)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (first, written)
    content = json.loads(first)
    path.write_text(json.dumps(content | {"value": 1.0}) + "\n")
    status, printed = evaluate(place, "int3")
    assert status == 0
    assert path.read_bytes() == first
    assert "1.00000" not in printed


@pytest.mark.parametrize(
    ("platforms", "run", "says"),
    [
        ("", "RALEARN0", "PLATFORM names no platform; fix: PLATFORM= one or several of fp32"),
        ("tf32", "RALEARN0", "tf32 needs an NVIDIA GPU"),
        ("int8", "../unfinished", "unfinished is interrupted; fix: run `make` until the run is finished"),
        ("int8", "../bare", "bare has no checkpoint; fix: copy the run's folder with its checkpoint/"),
        ("int8", "../wider", "does not fit the model: model."),
        ("int8", "../torn", "torn/checkpoint has no complete checkpoint"),
    ],
)
def test_an_unusable_request_is_refused_in_one_line(
    place: Workplace, platforms: str, run: str, says: str
) -> None:
    folder = place.study / "runs" / run
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, printed = evaluate(place, platforms, run)
    assert status
    assert {path: path.read_bytes() for path in before} == before
    (error,) = [line for line in printed.splitlines() if line.startswith("error:")]
    assert says in error


def test_a_run_on_other_data_is_refused(place: Workplace, tmp_path: Path) -> None:
    record_file = place.study / "runs/RALEARN0/run.json"
    before = record_file.read_bytes()
    content = json.loads(before)
    content["fingerprint"]["validation"] = "0" * 64
    sums = record_file.with_name(records.SUMS).read_bytes()
    write_checked(record_file, content)
    try:
        status, printed = evaluate(place, "int8")
    finally:
        record_file.write_bytes(before)
        record_file.with_name(records.SUMS).write_bytes(sums)
    assert status
    assert "was validated on other windows" in printed

"""`python -m referee compare` and `make compare-records`: files, exit status; unusable records."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from referee.__main__ import main
from referee.numerics.compare.compare_records import compare_records
from tests.referee.numerics.compare.small_models import STATISTICS, TENSORS, ours, record

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("golden"), ours(), **STATISTICS)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Any = ours()
    model.blocks[1].norm2.eps = 1e-3
    return record(tmp_path_factory.mktemp("faulty"), model, **STATISTICS)


def test_a_divergence_is_written_and_the_status_is_0(
    faulty: Path, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "-tp", str(faulty), "-gp", str(golden), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "verdict: diverges" in printed
    assert "first divergence: Module.blocks.1.norm2.LayerNorm.forward.0" in printed
    content = json.loads((out / "compare.json").read_text())
    first = content["first_divergence"]
    assert content["verdict"] == "diverges"
    assert first["module"] == "blocks.1.norm2"
    assert first["direction"] == "forward"
    assert first["units"] > 100
    assert (first["evidence"], first["place"], first["golden"]) == ("setting", "eps", "1e-05")
    assert "transformer.py" in first["stack"][0]
    with (out / "compare_result.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["golden name"] for line in lines} >= {"Module.blocks.1.norm2.LayerNorm.forward.0"}
    assert "blocks.1.norm2" in (out / "compare.html").read_text()


def test_values_recorded_give_metrics_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    model: Any = ours()
    with torch.no_grad():
        model.blocks[0].mlp.fc.weight *= 1.001
    right, wrong = record(tmp_path, ours(), **TENSORS), record(tmp_path, model, **TENSORS)
    found = compare_records(wrong, right)
    assert found.first
    cells = [cell for cell in found.first.row.cells if cell.side == "parameter" and cell.place == "weight"]
    assert cells[0].difference.metrics["max_relative"] == pytest.approx(1e-3, rel=1e-3)
    assert cells[0].difference.metrics["cosine"] == pytest.approx(1)
    for file in (wrong / "rank0/dump_tensor_data").iterdir():
        file.write_bytes(b"damaged")
    assert main(["compare", "-tp", str(wrong), "-gp", str(right), "-o", str(tmp_path / "out")]) == 1


def test_a_map_of_names_matches_renamed_modules(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "renamed/rank0"
    shutil.copytree(golden / "rank0", folder)
    replaced(folder, "Module.blocks.", "Module.layers.")
    (tmp_path / "map.json").write_text('{"layers": "blocks"}')
    arguments = ["compare", "-tp", str(folder), "-gp", str(golden), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--map", str(tmp_path / "map.json")]) == 0
    assert json.loads((tmp_path / "out/compare.json").read_text())["verdict"] == "equal"


def replaced(folder: Path, old: str, new: str) -> None:
    for file in folder.rglob("*.json"):
        file.write_text(file.read_text().replace(old, new))


def write(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "rank0/dump.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write("{"), "is not JSON"),
        (write('{"data": {}}'), "has no rows"),
        (write('{"data": {"x": {}}}'), "names no module or function"),
        (lambda folder: replaced(folder, '"Norm": ', '"Norm": "x", "norm": '), "not a number"),
        (shutil.rmtree, "does not exist"),
        (lambda folder: (folder / "rank0/dump.json").unlink(), "has no dump.json"),
    ],
)  # fmt: skip
def test_an_unusable_record_is_one_line_and_status_1(
    damage: Callable[[Path], Any],
    message: str,
    golden: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "record"
    shutil.copytree(golden, folder)
    damage(folder)
    assert main(["compare", "-tp", str(folder), "-gp", str(golden), "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "fix: " in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()

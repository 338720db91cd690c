"""`python -m numerics compare` and `make compare-records`: files, exit status, msProbe's dumps, unusable records."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from numerics.__main__ import main
from tests.numerics.compare.small_models import STATISTICS, TENSORS, compared, ours, record, step

ROOT = Path(__file__).parents[3]


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


def test_the_same_record_is_equal(golden: Path, tmp_path: Path) -> None:
    assert main(["compare", "-tp", str(golden), "-gp", str(golden), "-o", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "compare.json").read_text())
    assert (content["verdict"], content["first_divergence"]) == ("equal", None)


def test_make_passes_paths_without_a_shell(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a record $(touch x)"
    shutil.copytree(golden, folder)
    done = subprocess.run(
        [
            "make",
            "compare-records",
            f"PYTHON={sys.executable}",
            f"A={folder}",
            f"B={golden}",
            f"OUT={tmp_path / 'out'}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "verdict: equal" in done.stdout, done.stderr
    assert not (ROOT / "x").exists()


def test_values_recorded_give_metrics_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    model: Any = ours()
    with torch.no_grad():
        model.blocks[0].mlp.fc.weight *= 1.001
    right, wrong = record(tmp_path, ours(), **TENSORS), record(tmp_path, model, **TENSORS)
    found = compared(wrong, right)
    assert found.first
    cells = [cell for cell in found.first.row.cells if cell.side == "parameter" and cell.place == "weight"]
    assert cells[0].difference.metrics["max_relative"] == pytest.approx(1e-3, rel=1e-3)
    assert cells[0].difference.metrics["cosine"] == pytest.approx(1)
    for file in (wrong / "rank0/dump_tensor_data").iterdir():
        file.write_bytes(b"damaged")
    assert main(["compare", "-tp", str(wrong), "-gp", str(right), "-o", str(tmp_path / "out")]) == 1


def test_an_envelope_explains_the_error_of_its_rows(golden: Path, tmp_path: Path) -> None:
    def noisy(size: float) -> Path:
        model = ours()
        draws = torch.Generator().manual_seed(int(1e9 * size))

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return output * (1 + size * torch.empty(output.shape).normal_(generator=draws))

        model.get_submodule("blocks.1.mlp").register_forward_hook(hook)
        return record(tmp_path, model, step, level="L0")

    right, other, third = (noisy(size) for size in (0.0, 1e-4, 1.1e-4))
    assert compared(third, right).verdict == "diverges"
    assert compared(third, right, envelope=other).verdict == "rounding"


MSPROBE = {
    "task": "statistics",
    "level": "L0",
    "framework": "pytorch",
    "dump_data_dir": None,
    "data": {
        "Module.fc.Linear.forward.0": {
            "input_args": [
                {
                    "type": "torch.Tensor",
                    "dtype": "torch.float32",
                    "shape": [2, 2],
                    "Max": 1.0,
                    "Min": -1.0,
                    "Mean": 0.0,
                    "Norm": 2.0,
                    "requires_grad": False,
                }
            ],
            "input_kwargs": {},
            "output": [
                {
                    "type": "torch.Tensor",
                    "dtype": "torch.float32",
                    "shape": [2, 2],
                    "Max": 1.5,
                    "Min": float("nan"),
                    "Mean": 0.5,
                    "Norm": float("inf"),
                    "requires_grad": True,
                }
            ],
            "parameters": {
                "weight": {
                    "type": "torch.Tensor",
                    "dtype": "torch.float32",
                    "shape": [2, 2],
                    "Max": 1.0,
                    "Min": 0.0,
                    "Mean": 0.5,
                    "Norm": 1.0,
                    "requires_grad": True,
                }
            },
        },
        "Module.fc.Linear.backward.0": {"input": [None], "output": [None]},
        "Module.fc.Linear.parameters_grad": {"weight": [None]},
    },
}


def test_a_dump_of_msprobe_is_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "step0/rank"
        folder.mkdir(parents=True)
        (folder / "dump.json").write_text(json.dumps(MSPROBE))
        (folder / "stack.json").write_text(
            json.dumps({"0": [["Module.fc.Linear.forward.0"], ["File a.py, line 1"]]})
        )
        (folder / "construct.json").write_text(json.dumps({"Module.fc.Linear.forward.0": None}))
    assert compared(tmp_path / "a", tmp_path / "b").verdict == "equal"
    text = json.dumps(MSPROBE).replace('"Max": 1.5', '"Max": 1.75')
    (tmp_path / "a/step0/rank/dump.json").write_text(text)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first
    assert found.first.module == "fc"


def test_a_map_of_names_matches_renamed_modules(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "renamed/rank0"
    shutil.copytree(golden / "rank0", folder)
    for file in folder.glob("*.json"):
        file.write_text(file.read_text().replace("Module.blocks.", "Module.layers."))
    (tmp_path / "map.json").write_text('{"layers": "blocks"}')
    arguments = ["compare", "-tp", str(folder), "-gp", str(golden), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--map", str(tmp_path / "map.json")]) == 0
    assert json.loads((tmp_path / "out/compare.json").read_text())["verdict"] == "equal"


def write(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "rank0/dump.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write("{"), "is not JSON"),
        (write(""), "is not JSON"),
        (write("[]"), "is not a JSON object"),
        (write("{}"), 'has no "data"'),
        (write('{"data": {}}'), "has no rows"),
        (write('{"data": {"x": 3}}'), "is not an object"),
        (write('{"data": {"x": {}}}'), "names no module or function"),
        (write(json.dumps(MSPROBE).replace('"Max": 1.5', '"Max": "x"')), "not a number"),
        (write('{"data": {"Torch.x.0.forward": {}}}'), "no call of"),
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

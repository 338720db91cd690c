"""`python -m numerics oracle`: files, exit status, three parties, unusable input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from numerics import Recorder, RecorderConfig
from numerics.__main__ import main
from numerics.oracle.check import Oracle
from numerics.oracle.gpt2_shapes import Shapes, gpt2_operations
from numerics.oracle.operation import Operation
from numerics.oracle.parties import BOTH, LARGER, NOT_LARGER, OTHER_WRONG, WORSE, parties, read_results
from numerics.oracle.report import OracleReport, report_document, write_report
from numerics.oracle.results import Check, as_json, from_json
from numerics.oracle.rounding_model.measure import Measure
from pages.document import render_terminal
from tests.numerics.corpus.oracle_faults import FaultyDevice, other_gelu

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))
    recorder = Recorder(RecorderConfig(dump_path=str(folder), level="L1"))
    recorder.start(model)
    model(torch.randn(4, 8)).square().mean().backward()
    recorder.stop()
    recorder.step()
    return folder / "step0"


def test_a_clean_record_is_written_with_status_0(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["oracle", str(step), "-o", str(tmp_path / "a"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Operations against float64: rounding" in printed
    assert f"wrote {tmp_path / 'a' / 'oracle.json'}" in printed
    assert max(map(len, printed.splitlines())) <= 200
    content = json.loads((tmp_path / "a/oracle.json").read_text())
    assert content["verdict"] == "rounding"
    assert sum(content["counts"].values()) == len(content["rows"]) > 10
    rows = [row for row in content["rows"] if row["how"] == "device"]
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    assert all(sum(row["histogram"]) == row["elements"] for row in rows)
    page = (tmp_path / "a/oracle.html").read_text()
    assert "native_layer_norm" in page
    assert "Higham" in page


def test_two_machines_are_compared_on_the_same_inputs(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (("a", []), ("b", ["--other", str(tmp_path / "a")])):
        assert main(["oracle", str(step), "-o", str(tmp_path / name), "--device", "cpu", *options]) == 0
    content = json.loads((tmp_path / "b/oracle.json").read_text())
    assert len(content["three_parties"]) == sum(row["how"] == "device" for row in content["rows"])
    assert {pair["grade"] for pair in content["three_parties"]} == {NOT_LARGER}
    assert "Three parties" in capsys.readouterr().out


def test_a_faulty_device_is_wrong_alone_and_the_other_way_round(tmp_path: Path) -> None:
    operation = Operation("g", "g", F.gelu, [torch.randn(200)])
    right, faulty = Oracle(torch.device("cpu")), Oracle(torch.device("cpu"), other_gelu)
    assert isinstance(other_gelu(), FaultyDevice)
    for oracle, name in ((right, "right"), (faulty, "faulty")):
        oracle.check(operation)
        write_report(OracleReport(name, "one operation", oracle.checks, []), tmp_path / name)
    pairs, alone = parties(faulty.checks, read_results(tmp_path / "right"))
    assert ([pair.grade for pair in pairs], alone) == ([WORSE], 0)
    pairs, _ = parties(right.checks, read_results(tmp_path / "faulty" / "oracle.json"))
    assert [pair.grade for pair in pairs] == [OTHER_WRONG]
    report = OracleReport("faulty", "one operation", faulty.checks, [], "right", pairs)
    shown = " ".join(render_terminal(report_document(report)).split())
    assert "times what rounding allows" in shown
    assert "section 2.4.2" in shown


def check(distance: float, ratio: float, digest: str = "d") -> Check:
    measured = Measure(10, 1.0, 1.0, distance, ratio, (1,) * 16)
    return Check("n", "n", "forward", "result 0", "float32", "device", "given", measured, "", digest)


@pytest.mark.parametrize(
    ("mine", "other", "grade"),
    [
        (check(1e-7, 0.5), check(1e-8, 0.1), LARGER),
        (check(1e-8, 0.5), check(1e-8, 0.1), NOT_LARGER),
        (check(1e-3, 9.0), check(1e-8, 0.1), WORSE),
        (check(1e-3, 9.0), check(1e-3, 8.0), BOTH),
    ],
)
def test_the_gap_is_graded(mine: Check, other: Check, grade: str, tmp_path: Path) -> None:
    write_report(OracleReport("other", "s", [other], []), tmp_path)
    pairs, _ = parties([mine], read_results(tmp_path))
    assert [pair.grade for pair in pairs] == [grade]


def test_other_inputs_are_no_partner(tmp_path: Path) -> None:
    write_report(OracleReport("other", "s", [check(1e-7, 0.5, "another")], []), tmp_path)
    assert parties([check(1e-7, 0.5)], read_results(tmp_path)) == ([], 1)


def test_a_row_survives_the_file() -> None:
    infinite = Check(
        "n", "n", "forward", "result 0", "", "device", "given", Measure(3, math.inf, ratio=math.inf, why="x")
    )
    for one in (check(1e-7, 0.5), infinite):
        assert from_json(json.loads(json.dumps(as_json(one)))) == one


@pytest.mark.parametrize(
    ("content", "message"), [("{}", "holds no results"), ("[1]", "holds no results"), ("{", "is not JSON")]
)
def test_unusable_results_of_the_other_machine_are_one_line(
    content: str, message: str, step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "oracle.json").write_text(content)
    assert main(["oracle", str(step), "--other", str(tmp_path), "-o", str(tmp_path / "o")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "fix: " in error
    assert len(error.splitlines()) == 1


def test_unusable_records_and_devices_are_one_line(
    step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        [str(tmp_path / "no")],
        [str(step), "--device", "nonsense"],
        [str(step), "--device", "cpu:7x"],
    ):
        assert main(["oracle", *arguments, "-o", str(tmp_path / "o")]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert "fix: " in error
        assert len(error.splitlines()) == 1


def test_a_statistics_record_of_modules_alone_says_what_to_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path)))
    model = nn.Sequential(nn.Dropout(0.5))
    recorder.start(model)
    model(torch.randn(3, 4))
    recorder.step()
    assert main(["oracle", str(tmp_path), "-o", str(tmp_path / "o")]) == 1
    assert "level mix or L1" in capsys.readouterr().err


def test_the_operations_of_gpt2_are_within_rounding() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        oracle = Oracle(torch.device("cpu"), extremes=False)
        for operation in gpt2_operations(Shapes(32, 2, 16, 128), dtype):
            oracle.check(operation)
        assert len({found.name for found in oracle.checks}) == 13
        assert [found.text for found in oracle.checks if found.wrong] == []
        assert oracle.skipped == []


def test_the_example_of_the_page_prints_its_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/oracle.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "checked.py", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    block = page.partition("`python checked.py` prints")[2].partition("## ")[0]
    shown = [line.strip() for line in block.splitlines() if line.startswith("    ")]
    words = [[line.partition(":")[0] for line in lines] for lines in (printed, shown)]
    assert words[0] == words[1]

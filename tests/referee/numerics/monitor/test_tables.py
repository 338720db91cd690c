"""Tables: written by step, read back, cut at a resume, readable after a kill."""

import csv
import math
from pathlib import Path

import pytest

from referee.numerics.monitor.monitor_tables import TableWriter, read_series, table_files
from referee.numerics.monitor.targets import KINDS, STATISTICS
from tests.referee.numerics.monitor.table_rows import read_rows

VALUES = (1.0, -0.25, math.nan, math.inf, 1e-30, 0.5, 2.0, 0.0)


def write(folder: Path, steps: range, per_file: int = 4) -> TableWriter:
    writer = TableWriter(folder, per_file)
    for step in steps:
        writer.write("param", step, [("a.weight", VALUES), ("b", VALUES)])
        writer.write("update_ratio", step, [("a.weight", (0.1 * step,))])
    return writer


def test_rows_are_read_as_written_and_files_have_msprobes_names(tmp_path: Path) -> None:
    write(tmp_path, range(1, 10))
    assert [path.name for path in table_files(tmp_path)["param"]] == [
        "param_0-3.csv", "param_4-7.csv", "param_8-11.csv",
    ]  # fmt: skip
    table = read_series(tmp_path, "param")
    assert table
    assert (table.names, table.steps.tolist(), table.present.all()) == (
        ["a.weight", "b"],
        [*range(1, 10)],
        True,
    )
    assert [table.values[name][0, 0] for name in STATISTICS] == pytest.approx(VALUES, nan_ok=True)
    with (tmp_path / "param_0-3.csv").open(newline="") as file:
        first = next(iter(csv.DictReader(file)))
    assert list(first) == ["vpp_stage", "name", "step", *KINDS["param"]]
    assert read_series(tmp_path, "actv") is None


def test_a_resume_drops_later_rows_and_keeps_the_others_as_they_are(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole, range(1, 14))
    writer = write(cut, range(1, 12))
    kept = (cut / "param_0-3.csv").read_bytes()
    writer.truncate(5)
    assert (cut / "param_0-3.csv").read_bytes() == kept
    assert {row.step for row in read_rows(cut, "update_ratio")} == set(range(1, 6))
    write(cut, range(6, 14))
    for path in whole.glob("*.csv"):
        assert (cut / path.name).read_bytes() == path.read_bytes()
    writer.truncate(0)
    assert not table_files(cut)


@pytest.mark.parametrize("torn", [1, 9, 25])
def test_a_torn_last_line_is_left_out_and_written_again(tmp_path: Path, torn: int) -> None:
    write(tmp_path, range(1, 3))
    path = tmp_path / "param_0-3.csv"
    content = path.read_bytes()
    path.write_bytes(content[:-torn])
    table = read_series(tmp_path, "param")
    assert table
    assert table.present.tolist() == [[True, True], [True, False]]
    TableWriter(tmp_path, 4).truncate(1)
    write(tmp_path, range(2, 3))
    assert path.read_bytes() == content

"""Files of the monitor and of msProbe: columns, ranks, resumed runs, damaged lines, Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numerics.errors import NumericsError
from numerics.monitor.tables import KINDS, TableWriter
from numerics.trend.anomalies import statistics_of
from numerics.trend.tables import KINDS as KINDS_IN_ORDER
from numerics.trend.tables import has_monitor, kind_order, read_monitor
from tests.numerics.trend.monitor_files import names, noisy, write_losses, write_monitor


def test_every_value_is_read_at_its_tensor_and_step(tmp_path: Path) -> None:
    norms = noisy(5, 250)
    means = np.random.default_rng(1).standard_normal(norms.shape)
    for rank in (0, 1):
        write_monitor(
            tmp_path, norms + rank, rank=rank, more={"mean": means}, steps=range(1, 2500, 10), per_file=100
        )
    write_losses(tmp_path, [2.0, 1.5], [1.0, 0.5])
    found = read_monitor(tmp_path)
    assert found.ranks == [0, 1]
    table = found.tables["grad_reduced", 1]
    assert table.names == names()[:5]
    assert table.steps.tolist() == list(range(1, 2500, 10))
    assert np.allclose(table.values["norm"], norms + 1, rtol=1e-6)
    assert np.allclose(table.values["mean"], means, rtol=1e-6)
    assert table.present.all()
    assert (found.losses, found.norms) == ({1: 2.0, 2: 1.5}, {1: 1.0, 2: 0.5})
    rank = read_monitor(tmp_path / "monitor/rank1", statistics=["mean"])
    assert list(rank.tables) == [("grad_reduced", 1)]
    assert list(rank.tables["grad_reduced", 1].values) == ["mean"]
    assert read_monitor(tmp_path / "monitor").ranks == [0, 1]
    assert has_monitor(tmp_path)
    assert not has_monitor(tmp_path / "absent")


def test_files_of_the_monitor_are_read(tmp_path: Path) -> None:
    """The writer of numerics.monitor: all kinds, steps that are not evenly spaced, two files."""
    writer = TableWriter(tmp_path / "monitor/rank0", steps_per_file=100)
    for kind, columns in KINDS.items():
        for step in (1, 11, 12, 13, 150):
            writer.write(kind, step, [(f"h.{row}, x", [step + 0.5 + row] * len(columns)) for row in (0, 1)])
    found = read_monitor(tmp_path)
    assert {kind for kind, _ in found.tables} == set(KINDS)
    for kind, columns in KINDS.items():
        table = found.tables[kind, 0]
        assert table.names == ["h.0_ x", "h.1_ x"]
        assert table.steps.tolist() == [1, 11, 12, 13, 150]
        assert set(table.values) == set(columns)
        assert all(np.array_equal(values[1], table.steps + 1.5) for values in table.values.values())
    untested = {table.kind for table in found.tables.values() if not statistics_of(table)}
    assert untested == {"mg_direction"}
    assert {kind for kind in KINDS if kind_order(kind) == len(KINDS_IN_ORDER)} == set()


def test_nan_and_an_absent_row_are_not_the_same(tmp_path: Path) -> None:
    place = tmp_path / "monitor/rank0"
    place.mkdir(parents=True)
    (place / "param_0-9.csv").write_text("vpp_stage,name,step,norm\n0,a,1,nan\n0,b,2,inf\n0,a,3,-1e-3\n")
    table = read_monitor(tmp_path).tables["param", 0]
    assert table.present.tolist() == [[True, False, True], [False, True, False]]
    assert np.isnan(table.values["norm"][0, 0])
    assert np.isposinf(table.values["norm"][1, 1])


def test_of_a_step_that_was_written_twice_the_last_row_counts(tmp_path: Path) -> None:
    place = tmp_path / "rank0"
    place.mkdir()
    (place / "param_0-9.csv").write_text("vpp_stage,name,step,norm\n0,a,1,1\n0,a,2,2\n0,a,2,3\n")
    assert read_monitor(tmp_path).tables["param", 0].values["norm"].tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize(
    "tail", ["0,a,3,7", "0,a,3", "0,a,x,1\n", "0,a,3,x\n", "\x00\n", "0,a,99999999999999999999,1\n"]
)
def test_damaged_lines_are_left_out(tmp_path: Path, tail: str) -> None:
    place = tmp_path / "rank0"
    place.mkdir()
    (place / "param_0-9.csv").write_text(f"vpp_stage,name,step,norm\n0,a,1,1\n0,a,2,2\n{tail}")
    (place / "param_10-19.csv").write_text("vpp_st")
    found = read_monitor(tmp_path)
    assert found.tables["param", 0].values["norm"].tolist() == [[1.0, 2.0]]
    assert bool(found.notes) == tail.endswith("\n")


def test_names_of_msprobe_are_read(tmp_path: Path) -> None:
    """Columns as msProbe's writer names them: micro steps, virtual pipeline stages, older columns."""
    place = tmp_path / "Dec03_21-34-40-rank7-ab12"
    place.mkdir()
    head = "vpp_stage,name,step,micro_step,norm,nans"
    (place / "actv_0-0.csv").write_text(
        f"{head}\n0,l.0.input,0,0,1,0\n0,l.0.input,0,1,2,0\n1,l.0.input,0,0,3,1\n"
    )
    (place / "actv_grad_0-0.csv").write_text(
        "vpp_stage,module_name,step,input_grad.norm,output_grad.norm\n0,l.0,0,4,5\n"
    )
    (place / "param_origin_0-0.csv").write_text("vpp_stage,param_name,step,norm,shape\n0,w,0,6,2\n")
    found = read_monitor(tmp_path)
    assert found.ranks == [7]
    actv = found.tables["actv", 7]
    assert actv.names == ["l.0.input", "l.0.input:micro1", "1:l.0.input"]
    assert actv.values["norm"].ravel().tolist() == [1.0, 2.0, 3.0]
    assert actv.values["nan"].ravel().tolist() == [0.0, 0.0, 1.0]
    old = found.tables["actv_grad", 7]
    assert (old.names, old.values["norm"].ravel().tolist()) == (
        ["l.0.input_grad", "l.0.output_grad"],
        [4.0, 5.0],
    )
    assert found.tables["param_origin", 7].values["norm"].tolist() == [[6.0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a folder"),
        ({}, "has no monitor files"),
        ({"param_0-9.csv": "a,b\n1,2\n"}, "has the columns 'a, b'"),
        ({"param_0-9.csv": "vpp_stage,name,step,norm\n"}, "has no monitor files"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    tmp_path: Path, content: dict[str, str] | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "run/monitor/rank0").mkdir(parents=True)
        for name, text in content.items():
            (tmp_path / "run/monitor/rank0" / name).write_text(text)
    with pytest.raises(NumericsError, match=message) as caught:
        read_monitor(tmp_path / "run")
    assert "fix: " in str(caught.value)
    assert "\n" not in str(caught.value)

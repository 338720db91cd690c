"""Tables as Parquet equal the CSV files; a missing package is one line."""

import sys
from pathlib import Path

import pytest

from numerics.errors import NumericsError
from numerics.monitor.export import export
from numerics.monitor.tables import TableWriter, read_table, records


def tables(folder: Path) -> None:
    for step in (1, 1001):
        TableWriter(folder).write("param", step, [("a", (1.5, float("nan"), 0, 0, 0, 0, 2, 0))])
        TableWriter(folder).write("attention", step, [("b.sdpa.0", (0.5, 3.0))])


def test_parquet_has_the_rows_of_the_tables(tmp_path: Path) -> None:
    from pyarrow import parquet

    tables(tmp_path)
    for _ in range(2):
        written = export(tmp_path, "parquet")
    assert [path.name for path in written] == ["attention_1-1001.parquet", "param_1-1001.parquet"]
    assert sorted(tmp_path.glob("*.parquet")) == written
    found = parquet.read_table(written[1]).to_pylist()
    assert repr(found) == repr(list(records(read_table(tmp_path, "param"))))


def test_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tables(tmp_path)
    (folder,) = export(tmp_path, "tensorboard")
    assert any(path.name.startswith("events.out") for path in folder.iterdir())


@pytest.mark.parametrize(("form", "module"), [("parquet", "pyarrow"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_named(
    form: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path)
    for name in [
        name for name in sys.modules if name.split(".")[0] == module or name == "torch.utils.tensorboard"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NumericsError, match=f"fix: pip install {module}"):
        export(tmp_path, form)


def test_wrong_formats_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="'csv' is not a format"):
        export(tmp_path, "csv")
    with pytest.raises(NumericsError, match="has no tables"):
        export(tmp_path, "parquet")

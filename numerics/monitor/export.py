"""Write the tables of a monitor as Parquet or as TensorBoard events. Both need an extra package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numerics.dump_files import replacing, writing
from numerics.errors import NumericsError
from numerics.monitor.tables import StatisticsTable, read_table, records, table_files

FORMATS = ("parquet", "tensorboard")
Rows = Mapping[str, Sequence[tuple[str, Sequence[float]]]]  # kind -> (name, values)


def export(folder: Path, form: str) -> list[Path]:
    """Write every table in the folder of a rank in another format, beside it. Returns the files or folders."""
    if form not in FORMATS:
        raise NumericsError(f"{form!r} is not a format; fix: use {' or '.join(FORMATS)}")
    kinds = table_files(folder)
    if not kinds:
        raise NumericsError(f"{folder} has no tables; fix: name a run that was monitored (CONFIG_MONITOR=y)")
    tables = [read_table(folder, kind) for kind in kinds]
    if form == "parquet":
        return [write_parquet(table, folder) for table in tables]
    board = TensorBoard(folder / "tensorboard")
    for table in tables:
        for row in table.rows:
            board.write({table.kind: [(row.name, row.values)]}, row.step, {table.kind: table.columns})
    board.close()
    return [folder / "tensorboard"]


def write_parquet(table: StatisticsTable, folder: Path) -> Path:
    """Write <kind>_<first>-<last>.parquet, of the first and the last step in it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise _missing("pyarrow", error) from error
    steps = [row.step for row in table.rows] or [0]
    path = folder / f"{table.kind}_{min(steps)}-{max(steps)}.parquet"
    for old in folder.glob(f"{table.kind}_[0-9]*.parquet"):
        old.unlink()
    with writing(path, "free space on the disk"), replacing(path) as temporary:
        parquet.write_table(pyarrow.Table.from_pylist(list(records(table))), temporary)
    return path


class TensorBoard:
    """Scalars <kind>/<name>/<column> of a run."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        writer: Any = SummaryWriter
        self.writer = writer(str(folder))

    def write(self, rows: Rows, step: int, columns: Mapping[str, Sequence[str]]) -> None:
        """Add the rows of one step."""
        for kind, lines in rows.items():
            for name, values in lines:
                for column, value in zip(columns[kind], values, strict=True):
                    self.writer.add_scalar(f"{kind}/{name}/{column}", value, step)

    def close(self) -> None:
        self.writer.close()


def _missing(package: str, error: ImportError) -> NumericsError:
    return NumericsError(f"{package} cannot be imported ({error}); fix: pip install {package}")

"""Write files of a study as the program does, with their checksums."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from referee.verdict.rows import LOSS, VALIDATION, Row
from runtime import records, run_record
from runtime.run_record import RunRecord


def sums(run_dir: Path) -> str:
    return (run_dir / records.SUMS).read_text()


def write_checked(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file of a study or a run; of a finished run with SHA256SUMS."""
    value = {key: item for key, item in value.items() if key not in ("of", "sha256")}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name != "run.json":
        in_run = path.parent.parent.name == "runs"
        records.write(path, value, records.owner(path.parent) if in_run else "")
        if in_run and (path.parent / records.SUMS).exists() and path.name not in sums(path.parent):
            run_record.write(path.parent, run_record.load(path.parent))
        return
    try:
        record = run_record.from_json(records.to_plain(value))
    except records.InvalidJsonError:  # what a test wants to be refused
        records.write(path, value, records.owner(path.parent))
    else:
        records.write_rows(path.parent, rows_of(path.parent, record))
        run_record.write(path.parent, record)


def write_right(folder: Path, task: str, right: Sequence[bool]) -> None:
    """Write which items of a task a run has right."""
    for metric in ("acc", "acc_norm"):
        records.write_items(folder, Row("", "", 0, "", "", task, metric, 0, 0.0), right)


def rows_of(folder: Path, record: RunRecord) -> Iterator[Row]:
    """Return the rows that a run with this record writes: every validation, and the accuracies on items."""
    study = record.study or records.owner(folder).partition("/")[0]
    row = Row(study, record.variant, record.seed, "test", "fp32", "", LOSS, 0, math.nan)
    validated = row.replace(
        data=f"{VALIDATION}@{record.fingerprint.validation[:12] if record.fingerprint else ''}"
    )
    for tokens, seconds, loss in record.validation.history if record.validation else ():
        if loss is not None:
            yield validated.replace(tokens=tokens, value=loss)
        yield validated.replace(tokens=tokens, metric="train_seconds", value=seconds)
    for task in ("hellaswag", "choice"):
        score = getattr(record, task)
        if record.progress and score and score.items:
            scored = row.replace(
                data=f"{task}@{(score.items_sha256 or '')[:12]}", tokens=record.progress.tokens
            )
            for metric in ("acc", "acc_norm"):
                yield scored.replace(metric=metric, value=getattr(score, metric), items=score.items)

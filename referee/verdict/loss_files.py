"""Read the loss curve of any trainer: CSV, JSON lines, a Hugging Face trainer_state.json, or lines of a log.

The columns are recognised by their names (`LOSS`, `STEP`, `NORM`), else by their order: loss; step, loss; or step,
loss, gradient norm. Of a step that was logged twice, as by a resumed run, the last line counts.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from referee.errors import NumericsError

LARGEST_STEP = 10**15
HEAD = 4096  # bytes that show whether a file is text
FIRST_LINES = 200  # lines of a log before its first loss
FIX = "give a CSV, JSON lines, or one loss a line, as UTF-8 text"

# Names of columns, in the order of preference; letters and digits, everything else is "_".
STEP = ("step", "global_step", "train_step", "iteration", "iter", "current_step", "steps", "iterations", "it")
LOSS = ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "total_loss", "value")
NORM = ("grad_norm", "gradient_norm", "train_grad_norm", "gnorm", "total_norm", "global_norm")
EVALUATION = (  # a word of the name
    "val", "valid", "validation", "eval", "test", "acc", "accuracy", "hellaswag", "reward", "rewards", "logp",
)  # fmt: skip
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
LOGGED = {
    "step": re.compile(r"\b(?:global_step|step|iteration|iter|it)s?\b\W{0,12}(\d+)", re.IGNORECASE),
    "loss": re.compile(rf"\b(?:lm |train(?:ing)?[ _/]?)?loss\b[^\w+-]{{0,4}}({NUMBER})", re.IGNORECASE),
    "grad_norm": re.compile(rf"\b(?:grad(?:ient)?[ _]norm|gnorm)\b[^\w+-]{{0,4}}({NUMBER})", re.IGNORECASE),
}
Curve = dict[int, float]  # step -> value, ascending; not finite where the trainer computed no number


@dataclass
class LossCurve:
    """The curve of one run. numbered: whether the file has step numbers; else lines are counted from 1.

    evaluations: name -> step -> value. damaged: lines that could not be read.
    """

    name: str
    losses: Curve
    gradient_norms: Curve = field(default_factory=dict)
    evaluations: dict[str, Curve] = field(default_factory=dict)
    numbered: bool = True
    damaged: int = 0

    @property
    def steps(self) -> list[int]:
        return list(self.losses)

    def shifted(self, offset: int) -> LossCurve:
        """Return the same curve with `offset` added to its step numbers."""
        evaluations = {name: _shift(curve, offset) for name, curve in self.evaluations.items()}
        moved = (_shift(self.losses, offset), _shift(self.gradient_norms, offset), evaluations)
        return LossCurve(self.name, *moved, self.numbered, self.damaged)


def _shift(curve: Curve, offset: int) -> Curve:
    return {step + offset: value for step, value in curve.items()}


def read_curve(path: Path, name: str = "") -> LossCurve:
    """Read a file, or metrics.jsonl of a folder. NumericsError names what cannot be read and the fix."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise NumericsError(f"{path} is a folder without metrics.jsonl; fix: name a file of losses")
    if file.exists() and not file.is_file():  # a pipe would block
        raise NumericsError(f"{file} is not a regular file; fix: {FIX}")
    try:
        with file.open("rb") as content:
            head = content.read(HEAD)
        if b"\0" in head or head.startswith(b"\x1f\x8b"):
            raise NumericsError(f"{file} is a binary file; fix: {FIX}")
        found = _collect(_rows(file), LossCurve(name or str(path), {}))
    except UnicodeDecodeError as error:
        raise NumericsError(f"{file} is not UTF-8 text at byte {error.start}; fix: {FIX}") from error
    except csv.Error as error:
        raise NumericsError(f"{file} is no table: {error}; fix: {FIX}") from error
    except OSError as error:
        raise NumericsError(f"{file} cannot be read: {error.strerror}; fix: check its path") from error
    if not found.losses:
        raise NumericsError(f"{file} has no column of losses and no loss in any line; fix: {FIX}")
    return found


def same_file(one: Path, other: Path) -> bool:
    """Whether both paths lead to one file or folder."""
    return one.exists() and other.exists() and os.path.samefile(one, other)


# -- rows: column -> value; None for a line that cannot be read

Row = dict[str, Any]


def _rows(file: Path) -> Iterator[Row | None]:
    first = list(islice(_lines(file), FIRST_LINES))
    if not first:
        raise NumericsError(f"{file} is empty; fix: {FIX}")
    if first[0].startswith(("{", "[")):
        return _json_rows(file)
    is_log = any(LOGGED["loss"].search(line) for line in first)
    return _log_rows(file) if is_log else _table_rows(file)


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines that are not empty."""
    with file.open(encoding="utf-8-sig") as content:
        yield from filter(None, map(str.strip, content))


def _json_rows(file: Path) -> Iterator[Row | None]:
    """Yield the objects of JSON lines, or of the list in one JSON document, such as trainer_state.json."""
    first = _parse(next(_lines(file)))
    is_lines = isinstance(first, dict) and "log_history" not in first
    document = None if is_lines else _parse(file.read_text(encoding="utf-8-sig"))
    items = document.get("log_history") if isinstance(document, dict) else document
    if isinstance(items, list):
        yield from (item if isinstance(item, dict) else {"loss": item} for item in items)
    else:
        for content in map(_parse, _lines(file)):
            yield content if isinstance(content, dict) else None


def _parse(text: str) -> Any:
    """Return the content of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _log_rows(file: Path) -> Iterator[Row | None]:
    for line in _lines(file):
        matches = {name: pattern.search(line) for name, pattern in LOGGED.items()}
        if matches["loss"]:
            yield {name: match[1] for name, match in matches.items() if match}


def _table_rows(file: Path) -> Iterator[Row | None]:
    """Yield the rows of a table, with or without a header. A cell without text is left out."""
    names: list[str] = []
    for line in _lines(file):
        if not names:
            names = _cells(line.lstrip("# "))
            if any(_number(cell) is None and cell for cell in names):
                continue
            names = ["loss"] if len(names) == 1 else ["step", "loss", "grad_norm"][: len(names)]
        cells = _cells(line)
        is_whole = len(cells) >= len(names)
        yield {name: cell for name, cell in zip(names, cells, strict=False) if cell} if is_whole else None


def _cells(line: str) -> list[str]:
    """Split at tabs, commas, semicolons, else at blanks."""
    separator = next((sign for sign in "\t,;" if sign in line), None)
    cells = next(csv.reader([line], delimiter=separator)) if separator else line.split()
    return [cell.strip() for cell in cells]


# -- the curve


def _collect(rows: Iterable[Row | None], found: LossCurve) -> LossCurve:
    known: dict[tuple[str, ...], tuple[list[str | None], list[str]]] = {}
    chosen = None  # the column of losses; trainer_state.json ends with another one, the mean of the run
    unnumbered = 0
    for row in rows:
        if row is None:
            found.damaged += 1
            continue
        keys = tuple(row)
        if keys not in known:
            columns = [_column(keys, names) for names in (STEP, LOSS, NORM)]
            known[keys] = columns, [key for key in keys if _is_evaluation(key)]
        columns, evaluations = known[keys]
        step, loss, norm = (row[name] if name else None for name in columns)
        number, event = _step(step), row.get("event", "train")
        if event == "validation":
            _add_evaluation(found, number, "validation loss", loss)
        if event != "train":
            continue
        for key in evaluations:
            _add_evaluation(found, number, key, row[key])
        chosen = chosen or columns[1]
        if columns[1] is None or columns[1] != chosen:
            continue
        if columns[0] is None:
            number = unnumbered = unnumbered + 1
        value = (
            math.nan if loss is None else _number(loss)
        )  # null for NaN, where a trainer writes strict JSON
        if value is None or number is None:
            found.damaged += 1
            continue
        found.losses[number] = value
        if (size := _number(norm)) is not None:
            found.gradient_norms[number] = size
    found.losses = dict(sorted(found.losses.items()))
    found.gradient_norms = dict(sorted(found.gradient_norms.items()))
    found.evaluations = {name: dict(sorted(curve.items())) for name, curve in found.evaluations.items()}
    found.numbered = not unnumbered
    return found


def _add_evaluation(found: LossCurve, step: int | None, name: str, value: Any) -> None:
    number = _number(value)
    if step is not None and number is not None:
        found.evaluations.setdefault(name, {})[step] = number


def _number(value: Any) -> float | None:
    """Return a number, also one that is not finite; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def _step(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and abs(number) <= LARGEST_STEP and number % 1 == 0 else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _column(names: Iterable[str], known: tuple[str, ...]) -> str | None:
    """Return the name of a column: exactly a known one, else one that ends with it ("run 1 - train/loss")."""
    plain = {_plain(name): name for name in reversed(list(names)) if not _is_evaluation(name)}
    for word in known:
        if word in plain:
            return plain[word]
    return next((plain[name] for word in known for name in plain if name.endswith(f"_{word}")), None)


def _is_evaluation(name: str) -> bool:
    words = _plain(name).split("_")
    others = {"samples", "runtime", "second", "tokens", "steps", "step", "epoch"} & set(words)
    return not others and any(word in EVALUATION for word in words)

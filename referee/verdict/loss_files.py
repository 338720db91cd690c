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
from pathlib import Path
from typing import Any

from referee.errors import NumericsError

SIZE_LIMIT = 2**30  # bytes of a file
LINE_LIMIT = 2**20  # bytes of a line
LARGEST_STEP = 10**15
HEAD = 4096  # bytes that show whether a file is text
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
    "norm": re.compile(rf"\b(?:grad(?:ient)?[ _]norm|gnorm)\b[^\w+-]{{0,4}}({NUMBER})", re.IGNORECASE),
}
Curve = dict[int, float]  # step -> value, ascending; not finite where the trainer computed no number


@dataclass
class LossCurve:
    """The curve of one run. numbered: whether the file has step numbers; else lines are counted from 1.

    evaluations: name -> step -> value. damaged: lines that could not be read. repeated: lines of a step before its
    last line.
    """

    name: str
    losses: Curve
    gradient_norms: Curve = field(default_factory=dict)
    evaluations: dict[str, Curve] = field(default_factory=dict)
    numbered: bool = True
    damaged: int = 0
    repeated: int = 0

    @property
    def steps(self) -> list[int]:
        return list(self.losses)

    def shifted(self, offset: int) -> LossCurve:
        """Return the same curve with `offset` added to its step numbers."""
        evaluations = {name: _shift(curve, offset) for name, curve in self.evaluations.items()}
        moved = (_shift(self.losses, offset), _shift(self.gradient_norms, offset), evaluations)
        return LossCurve(self.name, *moved, self.numbered, self.damaged, self.repeated)


def _shift(curve: Curve, offset: int) -> Curve:
    return {step + offset: value for step, value in curve.items()}


def read_curve(path: Path, name: str = "") -> LossCurve:
    """Read a file, or metrics.jsonl of a folder. NumericsError names what cannot be read and the fix."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise NumericsError(f"{path} is a folder without metrics.jsonl; fix: name a file of losses")
    rows = _Rows(name or str(path))
    try:
        _check(file)
        kind, head = _kind(file)
        if kind == "json":
            rows.add_objects(_json_objects(file))
        elif kind == "log":
            rows.add_log(_lines(file))
        else:
            rows.add_table(_lines(file), head)
    except UnicodeDecodeError as error:
        raise NumericsError(f"{file} is not UTF-8 text at byte {error.start}; fix: {FIX}") from error
    except OSError as error:
        raise NumericsError(f"{file} cannot be read: {error.strerror}; fix: check its path") from error
    return rows.curve(file)


def _check(file: Path) -> None:
    size = file.stat().st_size
    if not file.is_file():
        raise NumericsError(f"{file} is not a regular file; fix: {FIX}")
    if size > SIZE_LIMIT:
        raise NumericsError(f"{file} has {size / 2**30:.1f} GiB, more than 1 GiB; fix: keep every tenth line")
    with file.open("rb") as content:
        head = content.read(HEAD)
    if not head.strip():
        raise NumericsError(f"{file} is empty; fix: {FIX}")
    if b"\0" in head or head.startswith(b"\x1f\x8b"):
        raise NumericsError(f"{file} is a binary file; fix: {FIX}")


def _lines(file: Path) -> Iterator[str]:
    """The lines that are not empty."""
    with file.open(encoding="utf-8-sig", newline=None) as content:
        while line := content.readline(LINE_LIMIT):
            if len(line) == LINE_LIMIT:
                raise NumericsError(f"{file} has a line of more than {LINE_LIMIT:,} characters; fix: {FIX}")
            if line.strip():
                yield line.strip()


def _kind(file: Path) -> tuple[str, str]:
    """Return json, log or table, and the first line that is not empty."""
    with file.open(encoding="utf-8-sig") as content:
        first = next((line.strip() for line in content if line.strip()), "")[:LINE_LIMIT]
    if not first:
        raise NumericsError(f"{file} is empty; fix: {FIX}")
    if first.startswith(("{", "[")):
        return "json", first
    return ("log" if LOGGED["loss"].search(first) or _no_table(file) else "table"), first


def _no_table(file: Path) -> bool:
    """Whether the first lines are prose, of which a later one has a loss."""
    found = [line for _, line in zip(range(200), _lines(file), strict=False)]
    cells = _cells(found[0])
    if any(_number(cell) is not None for cell in cells) or _column(cells, LOSS) is not None:
        return False
    return any(LOGGED["loss"].search(line) for line in found)


def _cells(line: str) -> list[str]:
    """Split at tabs, commas, semicolons, else at blanks."""
    separator = next((sign for sign in "\t,;" if sign in line), None)
    try:
        cells = next(csv.reader([line], delimiter=separator)) if separator else line.split()
    except csv.Error:  # a field of more than 128 KiB
        cells = [line]
    return [cell.strip() for cell in cells]


def _number(text: Any) -> float | None:
    """Return a number, also one that is not finite; None for anything else."""
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        return None
    try:
        return float(text)
    except (ValueError, OverflowError):
        return math.inf if isinstance(text, int) else None


def _step(value: Any) -> int | None:
    number = _number(value)
    if number is None or not abs(number) <= LARGEST_STEP or number != int(number):
        return None
    return int(number)


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


def _json_objects(file: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of JSON lines, or of one JSON document with a list. None for a line that is not JSON."""
    if (items := _json_document(file)) is not None:
        yield from (item if isinstance(item, dict) else {"loss": item} for item in items)
        return
    for line in _lines(file):
        content = _parse(line)
        yield content if isinstance(content, dict) else None


def _json_document(file: Path) -> list[Any] | None:
    """Return the list of a file that is one JSON document, such as trainer_state.json; None for JSON lines."""
    first = _parse(next(_lines(file)))
    if isinstance(first, dict) and not isinstance(first.get("log_history"), list):
        return None
    content = _parse(file.read_text(encoding="utf-8-sig"))
    if isinstance(content, dict):
        content = content.get("log_history")
    return content if isinstance(content, list) else None


def _parse(text: str) -> Any:
    """Return the content of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class _Rows:
    """Collect the rows of a file."""

    def __init__(self, name: str) -> None:
        self.found = LossCurve(name, {})
        self.unnumbered = 0

    def add_objects(self, objects: Iterator[dict[str, Any] | None]) -> None:
        names: dict[tuple[str, ...], list[str | None]] = {}
        chosen = None  # the column of losses; trainer_state.json ends with another one, the mean of the run
        for item in objects:
            if item is None:
                self.found.damaged += 1
                continue
            keys = tuple(item)
            columns = names.setdefault(keys, [_column(keys, known) for known in (STEP, LOSS, NORM)])
            step, loss, norm = (item.get(name) if name else None for name in columns)
            event = item.get("event", "train")
            if event == "validation":
                self.add_evaluation(_step(step), "validation loss", loss)
            if event != "train":
                continue
            for key in keys:
                if _is_evaluation(key):
                    self.add_evaluation(_step(step), key, item[key])
            chosen = chosen or columns[1]
            if columns[1] and columns[1] == chosen:  # null for NaN, where a trainer writes strict JSON
                self.add(step, math.nan if loss is None else loss, norm, bool(columns[0]))

    def add_log(self, lines: Iterator[str]) -> None:
        for line in lines:
            found = {name: pattern.search(line) for name, pattern in LOGGED.items()}
            step, loss, norm = (match and match[1] for match in found.values())
            if loss is not None:
                self.add(step, loss, norm, step is not None)

    def add_table(self, lines: Iterator[str], head: str) -> None:
        cells = _cells(head.lstrip("# "))
        if any(_number(cell) is None and cell for cell in cells):
            names, numbered = cells, True
            next(lines)
        else:
            names, numbered = (["loss"] if len(cells) == 1 else ["step", "loss", "grad_norm"]), len(cells) > 1
        columns = [_column(names, known) for known in (STEP, LOSS, NORM)]
        if columns[1] is None:
            raise NumericsError(
                f"{self.found.name} has no column of losses in {head[:80]!r}; fix: name one loss"
            )
        numbered = numbered and columns[0] is not None
        places = [names.index(name) if name else None for name in columns]
        evaluations = [(place, name) for place, name in enumerate(names) if _is_evaluation(name)]
        for line in lines:
            cells = _cells(line)
            step, loss, norm = (
                cells[place] if place is not None and place < len(cells) else None for place in places
            )
            for place, name in evaluations:
                self.add_evaluation(_step(step), name, cells[place] if place < len(cells) else None)
            if loss != "":
                self.add(step, loss, norm, numbered)

    def add(self, step: Any, loss: Any, norm: Any, numbered: bool) -> None:
        value = _number(loss)
        self.unnumbered += not numbered
        number = _step(step) if numbered else self.unnumbered
        if value is None or number is None:
            self.found.damaged += 1
            return
        self.found.repeated += number in self.found.losses
        self.found.losses[number] = value
        size = _number(norm)
        if size is not None:
            self.found.gradient_norms[number] = size

    def add_evaluation(self, step: int | None, name: str, value: Any) -> None:
        number = _number(value)
        if step is not None and number is not None:
            self.found.evaluations.setdefault(name, {})[step] = number

    def curve(self, file: Path) -> LossCurve:
        found = self.found
        if not found.losses:
            raise NumericsError(f"{file} has no loss in any line; fix: {FIX}")
        found.losses = dict(sorted(found.losses.items()))
        found.gradient_norms = dict(sorted(found.gradient_norms.items()))
        found.evaluations = {name: dict(sorted(curve.items())) for name, curve in found.evaluations.items()}
        found.numbered = not self.unnumbered
        return found


def same_file(one: Path, other: Path) -> bool:
    """Whether both paths lead to one file or folder."""
    return one.exists() and other.exists() and os.path.samefile(one, other)

"""Pinned rows: a name, a word and numbers of nine significant digits, stored in a table of tests/fixtures/pins."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures/pins"
CLOSE = 1e-8  # relative
ZERO = 1e-12  # a smaller number is rounding: it has no sign and is stored as 0


@dataclass(frozen=True)
class Row:
    """One answer. name: of the case, the question and the arm, unique. None: no such number."""

    name: str
    word: str
    numbers: tuple[float | None, ...]

    def line(self) -> str:
        return "\t".join((self.name, self.word, *map(_text, self.numbers))) + "\n"


def _text(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.9g}" if abs(number) >= ZERO else "0"


def write(name: str, rows: Iterable[Row]) -> None:
    """Store the rows. The file is the same, byte for byte, where the rows are."""
    content = "".join(row.line() for row in rows).encode()
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    print(f"{path}: {len(content.splitlines())} rows, {path.stat().st_size} bytes")


def differences(name: str, rows: Iterable[Row]) -> list[str]:
    """Compare rows with the stored ones: names, words, signs and None exactly, numbers within CLOSE."""
    content = (FOLDER / name).read_bytes()
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode()
    stored = {line.partition("\t")[0]: line.split("\t")[1:] for line in text.splitlines()}
    found = []
    for row in rows:
        word, *numbers = stored.pop(row.name, ["no row"])
        same = word == row.word and len(numbers) == len(row.numbers)
        if not same or not all(map(_close, numbers, row.numbers)):
            found.append(f"{row.line().strip()}, pinned: {word} {' '.join(numbers)}")
    return found + [f"{name}: pinned, and now without a row" for name in stored]


def _close(text: str, number: float | None) -> bool:
    if text == "-" or number is None:
        return text == "-" and number is None
    value = float(text)
    if abs(value) < 2 * ZERO or abs(number) < 2 * ZERO:
        return abs(value - number) < 2 * ZERO
    return abs(value - number) <= CLOSE * abs(value)

"""logp_diff: log-probabilities of rollout (sampling) against those of training, section 2.3.3.5.

For each sequence the mean over its response tokens of both sides, then the mean over sequences of rollout - training:

    logp_diff = mean_i( sum_t M_it (rollout_it - training_it) / sum_t M_it )

as verl's log_ppl_diff. Differences of both signs cancel in it, so the mean absolute difference is given with it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from referee.errors import NumericsError
from referee.numerics.rows import TableRow, text_table
from referee.numerics.text_files import json_lines, read_json, write_json, writing

THRESHOLD = 0.01
OVER, CANCEL, WITHIN = "over the threshold", "differences of both signs cancel", "within the threshold"
FLOAT32 = 2.0**-24  # the rounding of a number, relative to it

Rows = list[NDArray[np.float64]]  # a row for each sequence


@dataclass(frozen=True)
class LogpDiff:
    """Log-probabilities of the response tokens of each sequence, and how they differ."""

    rollout: Rows
    training: Rows
    positions: list[NDArray[np.int64]]  # of the response tokens in the row of their sequence, from 0
    differences: Rows  # rollout - training
    threshold: float

    @property
    def value(self) -> float:
        """Return logp_diff."""
        return _mean(self.differences)

    @property
    def mean_absolute(self) -> float:
        return _mean(map(np.abs, self.differences))

    @property
    def first_token(self) -> float:
        """Return the mean absolute difference of the first response tokens, which prefill computes."""
        return _mean(np.abs(row[:1]) for row in self.differences)

    @property
    def decode(self) -> float:
        """Return that of the later ones; 0 where there are none."""
        return _mean(np.abs(row[1:]) for row in self.differences if len(row) > 1)

    @property
    def over(self) -> dict[int, int]:
        """Return the first response token over the threshold, by its number, of each sequence that has one."""
        over = {
            number: np.flatnonzero(~(np.abs(row) <= self.threshold))
            for number, row in enumerate(self.differences)
        }
        return {number: int(places[0]) for number, places in over.items() if len(places)}

    @property
    def verdict(self) -> str:
        if not abs(self.value) <= self.threshold:
            return OVER
        return WITHIN if self.mean_absolute <= self.threshold else CANCEL


@np.errstate(invalid="ignore", over="ignore")
def _mean(rows: Iterable[NDArray[np.float64]]) -> float:
    """Return the mean of the means of rows; 0 without a row."""
    means = [row.mean() for row in rows]
    return float(np.mean(means)) if means else 0.0


def logp_diff(
    rollout: Any, training: Any, response_mask: Any = None, threshold: float = THRESHOLD
) -> LogpDiff:
    """Compare log-probabilities of tokens: arrays or tensors (sequences, tokens), one sequence (tokens,), or lists.

    response_mask: nonzero for response tokens; without it all tokens count. NumericsError for unequal shapes and for a
    sequence without response tokens. A value that is not finite within the mask is over every threshold.
    """
    if not 0 <= threshold < math.inf:
        raise NumericsError(f"the threshold is {threshold!r}; fix: give a number of at least 0")
    a, b = _rows(rollout, "rollout"), _rows(training, "training")
    masks = (
        [np.ones(len(row)) for row in a] if response_mask is None else _rows(response_mask, "response_mask")
    )
    for name, other in (("training", b), ("response_mask", masks)):
        if [*map(len, other)] != [*map(len, a)]:
            raise NumericsError(
                f"the shape of {name} is not that of rollout; fix: give the same sequences and tokens"
            )
    if not a:
        raise NumericsError("there are no sequences; fix: give at least one")
    if any(np.isnan(mask).any() for mask in masks):
        raise NumericsError("response_mask has NaN; fix: give 0 or 1")
    places = [np.flatnonzero(mask) for mask in masks]
    if empty := [number for number, place in enumerate(places) if not len(place)]:
        raise NumericsError(
            f"sequence {empty[0]} has no response tokens; fix: leave it out, or correct response_mask"
        )
    a, b = ([row[place] for row, place in zip(rows, places, strict=True)] for rows in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        differences = [mine - other for mine, other in zip(a, b, strict=True)]
    return LogpDiff(a, b, places, differences, threshold)


def _rows(value: Any, name: str) -> Rows:
    """Return the rows in float64. Tensors of any device and dtype are read."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    try:
        rows = [np.asarray(row, dtype=np.float64) for row in value]
    except (TypeError, ValueError) as error:
        raise NumericsError(f"{name} is not an array of numbers; fix: give (sequences, tokens)") from error
    if rows and all(row.ndim == 0 for row in rows):
        return [np.stack(rows)]
    if wrong := next((row for row in rows if row.ndim != 1), None):
        raise NumericsError(f"{name} has {wrong.ndim + 1} dimensions; fix: give (sequences, tokens)")
    return rows


# -- files

LOGP_NAMES = ("log_probs", "log_prob", "logprobs", "logp", "rollout_log_probs", "rollout_log_prob", "old_log_probs",
              "old_log_prob")  # fmt: skip
MASK_NAMES = ("response_mask", "mask", "loss_mask")


def compare_files(rollout: Path, training: Path, threshold: float = THRESHOLD) -> LogpDiff:
    """Compare two files. A mask of one file counts for both; two masks must be equal."""
    (a, mask), (b, other) = read_logp(rollout), read_logp(training)
    if mask and other and not all(map(np.array_equal, mask, other)):
        raise NumericsError(
            f"{rollout} and {training} have different response masks; fix: save the same responses"
        )
    return logp_diff(a, b, mask or other, threshold)


def read_logp(path: Path) -> tuple[Rows, Rows | None]:
    """Return the log-probabilities and the masks of a file: .npz, .json or .jsonl.

    .npz and .json hold {"log_probs": [[...]], "response_mask": [[...]]}; a line of .jsonl, or an item of a list in
    .json, holds these of one sequence. Sequences may have different lengths. NumericsError where it cannot be used.
    """
    kind = path.suffix.lower()
    if kind not in (".npz", ".json", ".jsonl"):
        raise NumericsError(f"{path} has an unknown type; fix: save it as .npz, .json or .jsonl")
    if not path.is_file():
        raise NumericsError(f"{path} is not a file; fix: give a file of log-probabilities")
    content: Any
    try:
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as file:
                content = {name: file[name] for name in file.files if name in (*LOGP_NAMES, *MASK_NAMES)}
        else:
            content = read_json(path) if kind == ".json" else [row for _, row in json_lines(path)]
        if isinstance(content, list):
            names = set(itertools.chain(*content))
            content = {
                name: [row[name] for row in content] for name in (*LOGP_NAMES, *MASK_NAMES) if name in names
            }
        values, masks = _named(content, LOGP_NAMES), _named(content, MASK_NAMES)
        if values is None:
            raise ValueError(f"nothing has one of the names {', '.join(LOGP_NAMES)}")
        return _rows(values, f"{path}"), None if masks is None else _rows(masks, f"the mask of {path}")
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check its path") from error
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise NumericsError(f"{path} holds no log-probabilities: {error}; fix: save it again") from error


def _named(content: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    present = [name for name in names if name in content]
    if len(present) > 1:
        raise ValueError(f"{' and '.join(present)}, of which one is needed")
    return content[present[0]] if present else None


# -- the command

DESCRIPTION = """
Compare the log-probabilities of the response tokens in two files (.npz, .json or .jsonl with log_probs and
response_mask): the mean over tokens and sequences of rollout - training. The exit status is 0 for every verdict; it
is 1 where a file cannot be used.
"""
MOST_ROWS = 20  # of sequences in the table


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add logp-diff to the commands of `python -m referee`."""
    parser = commands.add_parser(
        "logp-diff", description=DESCRIPTION, help="compare rollout against training"
    )
    parser.add_argument("rollout", type=Path, metavar="A", help="log-probabilities of rollout (sampling)")
    parser.add_argument("training", type=Path, metavar="B", help="log-probabilities of training")
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="of logp_diff and of a token (default 0.01)"
    )
    parser.add_argument("-o", "--output_path", type=Path, help="folder of logp_diff.json")
    parser.set_defaults(
        run=lambda given: show(
            compare_files(given.rollout, given.training, given.threshold), given.output_path
        )
    )


def show(found: LogpDiff, folder: Path | None) -> int:
    """Print the result, sequences over the threshold first. Returns 0. folder: of logp_diff.json."""
    names = ("value", "mean_absolute", "threshold", "first_token", "decode")
    numbers = {name: getattr(found, name) for name in names}
    rows = sorted(table_rows(found), key=lambda row: not row.place)
    path = folder / "logp_diff.json" if folder else None
    if path:  # before the output: a folder that cannot be written is one line
        differences = [row.tolist() for row in found.differences]
        positions = [row.tolist() for row in found.positions]
        content = {"verdict": found.verdict, **numbers, "differences": differences, "positions": positions}
        with writing(path, "give another folder by -o"):
            write_json(path, content)
    print(
        f"logp_diff: {found.verdict}",
        f"{found.value:.3g}: the mean over {len(rows)} sequences of rollout - training; threshold {found.threshold:g}",
        f"mean absolute difference {found.mean_absolute:.3g}: first response tokens (prefill alone) "
        f"{found.first_token:.3g}, later tokens (decode) {found.decode:.3g}",
        *text_table(rows[:MOST_ROWS]),
        *(
            [f"{len(rows) - MOST_ROWS} more sequences: -o FOLDER writes them"]
            if len(rows) > MOST_ROWS
            else []
        ),
        advice(found),
        *([f"wrote {path}"] if path else []),
        sep="\n",
    )
    return 0


@np.errstate(invalid="ignore", over="ignore")
def table_rows(found: LogpDiff) -> Iterator[TableRow]:
    """Yield a row for each sequence: its first token over the threshold, with rollout as target."""
    for number, row in enumerate(found.differences):
        sizes, golden, place = np.abs(row), found.training[number], found.over.get(number)
        units = float(np.max(sizes / (FLOAT32 * np.maximum(1, np.abs(golden)))))
        means = f"mean {row.mean():.3g}, absolute {sizes.mean():.3g}"
        texts = ("", "", "")
        if place is not None:
            token = f"token {place} (position {found.positions[number][place]})"
            texts = token, f"{found.rollout[number][place]:.6g}", f"{golden[place]:.6g}"
        yield TableRow(f"sequence {number}", f"{len(row)} tokens", *texts, units=units, evidence=means)


def advice(found: LogpDiff) -> str:
    """Return what to do next (sections 2.3.3.5.1 and 2.3.3.5.2).

    Decoding alone differs where every first response token is within the threshold, and they differ by at most a tenth
    of what the later tokens do.
    """
    if found.verdict == WITHIN:
        return "Next: nothing to do; go on with the training (section 2.3.3)."
    if 10 * found.first_token > found.decode or 0 in found.over.values():
        return "Next: the prefill differs too: record both forward passes on one sequence, and compare the records."
    return "Next: only decoding differs: check how the KV cache is cleared, written and read."

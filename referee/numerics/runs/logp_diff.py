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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
class TokenDiff:
    """One token with its log-probabilities."""

    sequence: int
    position: int  # in the row of its sequence, from 0
    response: int  # its number among the response tokens, from 0
    rollout: float
    training: float


@dataclass(frozen=True)
class SequenceDiff:
    """The differences of one sequence, rollout - training."""

    tokens: int
    mean: float
    mean_absolute: float
    units: float  # the largest difference, in roundings of the log-probability in float32
    prefill: float  # absolute difference of the first response token, which prefill computes
    decode: float | None  # mean absolute difference of the later ones; None where there are none
    first: TokenDiff | None  # over the threshold
    differences: list[float]  # of every token, 0 outside the mask


@dataclass(frozen=True)
class LogpDiff:
    """The result of a comparison."""

    value: float  # logp_diff
    mean_absolute: float
    threshold: float
    sequences: list[SequenceDiff]
    first_token: float  # mean absolute difference of the first response tokens, which prefill computes
    decode: float  # of the later ones; 0 where there are none

    @property
    def first(self) -> TokenDiff | None:
        """The first token over the threshold, of the first sequence that has one."""
        return next((one.first for one in self.sequences if one.first), None)

    @property
    def verdict(self) -> str:
        if not abs(self.value) <= self.threshold:
            return OVER
        return WITHIN if self.mean_absolute <= self.threshold else CANCEL


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
    sequences = [
        _sequence(number, *rows, threshold) for number, rows in enumerate(zip(a, b, masks, strict=True))
    ]
    later = [one.decode for one in sequences if one.decode is not None]
    return LogpDiff(
        value=float(np.mean([one.mean for one in sequences])),
        mean_absolute=float(np.mean([one.mean_absolute for one in sequences])),
        threshold=threshold,
        sequences=sequences,
        first_token=float(np.mean([one.prefill for one in sequences])),
        decode=float(np.mean(later)) if later else 0.0,
    )


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


@np.errstate(invalid="ignore", over="ignore")
def _sequence(
    number: int, a: NDArray[np.float64], b: NDArray[np.float64], mask: NDArray[np.float64], threshold: float
) -> SequenceDiff:
    where = np.flatnonzero(mask)
    if not where.size:
        raise NumericsError(
            f"sequence {number} has no response tokens; fix: leave it out, or correct response_mask"
        )
    differences = np.zeros(len(a))
    differences[where] = a[where] - b[where]
    size, first = np.abs(differences[where]), None
    over = np.flatnonzero(~(size <= threshold))
    if over.size:
        place = int(where[over[0]])
        first = TokenDiff(number, place, int(over[0]), float(a[place]), float(b[place]))
    return SequenceDiff(
        tokens=len(where),
        mean=float(differences[where].mean()),
        mean_absolute=float(size.mean()),
        units=float(np.max(size / (FLOAT32 * np.maximum(1, np.abs(b[where]))))),
        prefill=float(size[0]),
        decode=float(size[1:].mean()) if len(size) > 1 else None,
        first=first,
        differences=differences.tolist(),
    )


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
    ordered = sorted(enumerate(found.sequences), key=lambda pair: pair[1].first is None)
    count = len(ordered)
    path = folder / "logp_diff.json" if folder else None
    if path:  # before the output: a folder that cannot be written is one line
        with writing(path, "give another folder by -o"):
            write_json(path, {"verdict": found.verdict, "logp_diff": found.value, **asdict(found)})
    print(
        f"logp_diff: {found.verdict}",
        f"{found.value:.3g}: the mean over {count} sequences of rollout - training; threshold {found.threshold:g}",
        f"mean absolute difference {found.mean_absolute:.3g}: first response tokens (prefill alone) "
        f"{found.first_token:.3g}, later tokens (decode) {found.decode:.3g}",
        *text_table(_row(number, one) for number, one in ordered[:MOST_ROWS]),
        *([f"{count - MOST_ROWS} more sequences: -o FOLDER writes them"] if count > MOST_ROWS else []),
        advice(found),
        *([f"wrote {path}"] if path else []),
        sep="\n",
    )
    return 0


def _row(number: int, one: SequenceDiff) -> TableRow:
    """Return a sequence as a row: its first token over the threshold, with rollout as target."""
    means = f"mean {one.mean:.3g}, absolute {one.mean_absolute:.3g}"
    row = TableRow(f"sequence {number}", f"{one.tokens} tokens", units=one.units, evidence=means)
    if one.first is None:
        return row
    place = f"token {one.first.response} (position {one.first.position})"
    return replace(row, place=place, target=f"{one.first.rollout:.6g}", golden=f"{one.first.training:.6g}")


def advice(found: LogpDiff) -> str:
    """Return what to do next (sections 2.3.3.5.1 and 2.3.3.5.2).

    Decoding alone differs where every first response token is within the threshold, and they differ by at most a tenth
    of what the later tokens do.
    """
    if found.verdict == WITHIN:
        return "Next: nothing to do; go on with the training (section 2.3.3)."
    if 10 * found.first_token > found.decode or any(
        one.first and one.first.response == 0 for one in found.sequences
    ):
        return "Next: the prefill differs too: record both forward passes on one sequence, and compare the records."
    return "Next: only decoding differs: check how the KV cache is cleared, written and read."

"""logp_diff: log-probabilities of rollout (sampling) against those of training, section 2.3.3.5.

For each sequence the mean over its response tokens of both sides, then the mean over sequences of rollout - training:

    logp_diff = mean_i( sum_t M_it (rollout_it - training_it) / sum_t M_it )

as verl's log_ppl_diff. Differences of both signs cancel in it, so the mean absolute difference is given with it.
"""

from __future__ import annotations

import argparse
import math
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from referee.errors import NumericsError
from referee.numerics.dump_files import finite, write_json, writing
from referee.numerics.rows import TableRow, text_table
from referee.numerics.text_files import json_lines, read_json

THRESHOLD = 0.01
OVER, CANCEL, WITHIN = "over the threshold", "differences of both signs cancel", "within the threshold"
FLOAT32 = 2.0**-24  # the rounding of a number, relative to it


@dataclass(frozen=True)
class TokenDiff:
    """One token with its log-probabilities."""

    sequence: int
    position: int  # in the row of the arrays, from 0
    response: int  # its number among the response tokens, from 0
    rollout: float
    training: float


@dataclass(frozen=True)
class SequenceDiff:
    """The differences of one sequence, rollout - training."""

    tokens: int
    mean: float
    mean_absolute: float
    maximum: float  # of the absolute differences
    units: float  # the largest difference, in roundings of the log-probability in float32
    first: TokenDiff | None  # over the threshold


@dataclass(frozen=True)
class LogpDiff:
    """The result of a comparison."""

    value: float  # logp_diff
    mean_absolute: float
    threshold: float
    sequences: list[SequenceDiff]
    per_token: NDArray[np.float64]  # rollout - training, 0 outside the mask
    first_token: float  # mean absolute difference of the first response tokens, which prefill computes
    decode: float  # of the later ones; 0 where there are none

    @property
    def first(self) -> TokenDiff | None:
        """The first token over the threshold, of the first sequence that has one."""
        return next((one.first for one in self.sequences if one.first), None)

    @property
    def exceeds(self) -> bool:
        """Whether |logp_diff| is over the threshold, or no number."""
        return not abs(self.value) <= self.threshold

    @property
    def prefill_over(self) -> int:
        """Return how many sequences are over the threshold at their first response token."""
        return sum(one.first is not None and one.first.response == 0 for one in self.sequences)

    @property
    def verdict(self) -> str:
        if self.exceeds:
            return OVER
        return WITHIN if self.mean_absolute <= self.threshold else CANCEL


def logp_diff(
    rollout: Any, training: Any, response_mask: Any = None, threshold: float = THRESHOLD
) -> LogpDiff:
    """Compare log-probabilities of tokens: arrays or tensors (sequences, tokens), or one sequence (tokens,).

    response_mask: nonzero for response tokens; without it all tokens count. NumericsError for unequal shapes and for a
    sequence without response tokens. A value that is not finite within the mask is over every threshold.
    """
    if not (isinstance(threshold, int | float) and math.isfinite(threshold) and threshold >= 0):
        raise NumericsError(f"the threshold is {threshold!r}; fix: give a number of at least 0")
    a, b = _matrix(rollout, "rollout"), _matrix(training, "training")
    mask = np.ones_like(a) if response_mask is None else _matrix(response_mask, "response_mask")
    for name, other in (("training", b), ("response_mask", mask)):
        if other.shape != a.shape:
            raise NumericsError(
                f"rollout has shape {a.shape}, {name} has {other.shape}; fix: give the same sequences and tokens"
            )
    if np.isnan(mask).any():
        raise NumericsError("response_mask has NaN; fix: give 0 or 1")
    chosen = mask != 0
    empty = np.flatnonzero(~chosen.any(axis=1))
    if not a.size or empty.size:
        which = f"sequence {empty[0]} has none" if a.size else "there are no sequences"
        raise NumericsError(
            f"no response tokens to compare: {which}; fix: leave it out, or correct response_mask"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        per_token = np.where(chosen, np.where(chosen, a, 0) - np.where(chosen, b, 0), 0.0)
        size = np.abs(per_token)
        places = [np.flatnonzero(row) for row in chosen]
        sequences = []
        for number, where in enumerate(places):
            part, first = size[number, where], None
            over = np.flatnonzero(~(part <= threshold))
            if over.size:
                response, place = int(over[0]), int(where[over[0]])
                values = float(a[number, place]), float(b[number, place])
                first = TokenDiff(number, place, response, *values)
            means = float(per_token[number, where].mean()), float(part.mean())
            units = part / (FLOAT32 * np.maximum(1, np.abs(b[number, where])))
            sequences.append(SequenceDiff(len(where), *means, float(part.max()), float(units.max()), first))
        later = [size[number, where[1:]].mean() for number, where in enumerate(places) if len(where) > 1]
        return LogpDiff(
            value=float(np.mean([one.mean for one in sequences])),
            mean_absolute=float(np.mean([one.mean_absolute for one in sequences])),
            threshold=threshold,
            sequences=sequences,
            per_token=per_token,
            first_token=float(np.mean([size[number, where[0]] for number, where in enumerate(places)])),
            decode=float(np.mean(later)) if later else 0.0,
        )


def _matrix(value: Any, name: str) -> NDArray[np.float64]:
    """Return a matrix in float64. Tensors of any device and dtype are read."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise NumericsError(f"{name} is not an array of numbers; fix: give (sequences, tokens)") from error
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2:
        raise NumericsError(f"{name} has {array.ndim} dimensions; fix: give (sequences, tokens)")
    return array


DESCRIPTION = """
Compare the log-probabilities of the response tokens in two files (.npz, .npy, .json, .jsonl with log_probs and
response_mask): the mean over tokens and sequences of rollout - training. The exit status is 0 for every verdict; it
is 1 where a file cannot be used.
"""
LOGP_NAMES = ("log_probs", "log_prob", "logprobs", "logp", "rollout_log_probs", "rollout_log_prob", "old_log_probs",
              "old_log_prob")  # fmt: skip
MASK_NAMES = ("response_mask", "mask", "loss_mask")
MOST_ROWS = 20  # of sequences in the table


@dataclass(frozen=True)
class LogpFile:
    """Log-probabilities of one file (sequences, tokens), padded behind the end of a sequence."""

    values: NDArray[np.float64]
    mask: NDArray[np.float64]
    has_mask: bool  # whether the file gives the mask; else all its tokens count


def compare_files(rollout: Path, training: Path, threshold: float = THRESHOLD) -> LogpDiff:
    """Compare two files. A mask of one file counts for both; two masks must be equal."""
    a, b = read_logp(rollout), read_logp(training)
    if a.values.shape != b.values.shape:
        raise NumericsError(
            f"{rollout} has shape {a.values.shape}, {training} has {b.values.shape}; fix: save the same sequences"
        )
    masks = [one.mask for one in (a, b) if one.has_mask] or [a.mask, b.mask]
    if not np.array_equal(masks[0] != 0, masks[-1] != 0):
        raise NumericsError(
            f"{rollout} and {training} have different response masks; fix: save the same responses"
        )
    return logp_diff(a.values, b.values, masks[0], threshold)


def read_logp(path: str | os.PathLike[str]) -> LogpFile:
    """Read .npz or .json ({"log_probs": [[...]], "response_mask": [[...]]}), .jsonl (one sequence a line) or .npy.

    A .json file may also hold a list of what the lines of a .jsonl file hold. Sequences may have different lengths.
    NumericsError where the file cannot be used.
    """
    path = Path(path)
    if path.suffix.lower() not in (".npz", ".npy", ".json", ".jsonl"):
        raise NumericsError(f"{path} has an unknown type; fix: save it as .npz, .npy, .json or .jsonl")
    if path.exists() and not path.is_file():
        raise NumericsError(f"{path} is not a file; fix: give a file of log-probabilities")
    try:
        return _padded(*_rows(_content(path)))
    except OSError as error:
        raise NumericsError(
            f"{path} cannot be read: {error.strerror or error}; fix: check its path"
        ) from error
    except (ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise NumericsError(f"{path} holds no log-probabilities: {error}; fix: save it again") from error


def _content(path: Path) -> Any:
    """Return what a file holds: arrays by name, or a list of sequences."""
    match path.suffix.lower():
        case ".json":
            return read_json(path)
        case ".jsonl":
            return [content for _, content in json_lines(path)]
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return list(loaded)
    with loaded:
        return {name: loaded[name] for name in loaded.files if name in (*LOGP_NAMES, *MASK_NAMES)}


def _rows(content: Any) -> tuple[list[Any], list[Any] | None]:
    """Return the log-probabilities of each sequence, and their masks. ValueError says what is wrong."""
    if isinstance(content, list) and any(isinstance(part, dict) for part in content):
        parts = [_rows(part) for part in content]
        masks = [mask[0] for _, mask in parts if mask]
        if masks and len(masks) < len(parts):
            raise ValueError("a mask in some sequences only")
        return [values[0] for values, _ in parts], masks or None
    values, mask = content, None
    if isinstance(content, dict):
        values, mask = _named(content, LOGP_NAMES), _named(content, MASK_NAMES)
    if not isinstance(values, list | np.ndarray) or not len(values):
        raise ValueError(f"no list under one of the names {', '.join(LOGP_NAMES)}")
    if np.ndim(values[0]):
        return list(values), None if mask is None else list(mask)
    return [values], None if mask is None else [mask]


def _named(content: dict[str, Any], names: tuple[str, ...]) -> Any:
    present = [name for name in names if name in content]
    if len(present) > 1:
        raise ValueError(f"{' and '.join(present)}, of which one is needed")
    return content[present[0]] if present else None


def _padded(values: list[Any], masks: list[Any] | None) -> LogpFile:
    """Pad sequences to one length. The padding is outside the mask."""
    rows = [np.asarray(row, dtype=np.float64) for row in values]
    chosen = [np.asarray(row, dtype=np.float64) for row in masks or [np.ones(row.shape) for row in rows]]
    if any(row.ndim != 1 for row in rows):
        raise ValueError("more than one list of numbers a sequence")
    if [row.shape for row in rows] != [row.shape for row in chosen]:
        raise ValueError("response_mask has other lengths than log_probs")
    width = max(map(len, rows))
    padded = [np.stack([np.pad(row, (0, width - len(row))) for row in part]) for part in (rows, chosen)]
    return LogpFile(padded[0], padded[1], masks is not None)


# -- the command


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
    parser.set_defaults(run=run_logp_diff)


def run_logp_diff(given: argparse.Namespace) -> int:
    show(compare_files(given.rollout, given.training, given.threshold), given.output_path)
    return 0


def show(found: LogpDiff, folder: Path | None) -> None:
    """Print the result: verdict, means, sequences over the threshold first, advice. folder: of logp_diff.json."""
    ordered = sorted(enumerate(found.sequences), key=lambda pair: pair[1].first is None)
    count = len(ordered)
    path = folder / "logp_diff.json" if folder else None
    if path:  # before the output: a folder that cannot be written is one line
        with writing(path, "give another folder by -o"):
            write_json(path, as_json(found))
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
    over, count = found.prefill_over, len(found.sequences)
    if over or 10 * found.first_token > found.decode:
        return (
            f"Next: the prefill differs too, over the threshold in {over} of {count} sequences: record both forward "
            "passes on one sequence and compare the records."
        )
    return "Next: only decoding differs: check how the KV cache is cleared, written and read."


def as_json(found: LogpDiff) -> dict[str, Any]:
    """Return what logp_diff.json holds. Numbers that are not finite are null."""
    numbers = ("mean_absolute", "threshold", "first_token", "decode")
    return {
        "verdict": found.verdict,
        "logp_diff": finite(found.value),
        **{name: finite(getattr(found, name)) for name in numbers},
        "first_over": _token(found.first),
        "sequences": [
            {name: finite(value) for name, value in vars(one).items() if name != "first"}
            | {"first_over": _token(one.first)}
            for one in found.sequences
        ],
        "per_token": [[finite(value) for value in row] for row in found.per_token.tolist()],
    }


def _token(token: TokenDiff | None) -> dict[str, Any] | None:
    return None if token is None else {name: finite(value) for name, value in vars(token).items()}

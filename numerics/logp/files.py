"""Read log-probabilities from files and compare two files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numerics.errors import NumericsError
from numerics.logp.diff import THRESHOLD, LogpDiff, as_matrix, logp_diff
from numerics.text_files import json_lines, read_json

LOGP_NAMES = ("log_probs", "log_prob", "logprobs", "logp", "rollout_log_probs", "rollout_log_prob", "old_log_probs",
              "old_log_prob")  # fmt: skip
MASK_NAMES = ("response_mask", "mask", "loss_mask")


@dataclass(frozen=True)
class LogpFile:
    """Log-probabilities of one file. has_mask: the file gives the mask; else all its tokens count."""

    values: NDArray[np.float64]
    mask: NDArray[np.float64]
    has_mask: bool


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
    """Read .npz, .npy, .json ({"log_probs": [[...]], "response_mask": [[...]]}) or .jsonl (one sequence a line).

    A .json file may also hold a list of what the lines of a .jsonl file hold.

    Sequences of a JSON file may have different lengths; the mask is 0 behind their end.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise NumericsError(f"{path} is not a file; fix: give a file of log-probabilities")
    try:
        match path.suffix.lower():
            case ".npz" | ".npy":
                return _numpy(path)
            case ".json":
                content = read_json(path)
                if isinstance(content, list) and any(isinstance(entry, dict) for entry in content):
                    return _sequences(path, content)
                return _ragged(path, *_rows(path, content))
            case ".jsonl":
                return _sequences(path, [content for _, content in json_lines(path)])
    except OSError as error:
        raise NumericsError(
            f"{path} cannot be read: {error.strerror or error}; fix: check its path"
        ) from error
    except (
        ValueError,
        TypeError,
        RecursionError,
        EOFError,
        OverflowError,
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        raise NumericsError(f"{path} holds no log-probabilities: {error}; fix: save it again") from error
    raise NumericsError(f"{path} has an unknown type; fix: save it as .npz, .npy, .json or .jsonl")


def _numpy(path: Path) -> LogpFile:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        values = as_matrix(loaded, str(path))
        return LogpFile(values, np.ones_like(values), False)
    with loaded:
        found = {name: loaded[name] for name in loaded.files if name in (*LOGP_NAMES, *MASK_NAMES)}
    mask = _named(path, found, MASK_NAMES)
    values = as_matrix(_wanted(path, found), str(path))
    if mask is None:
        return LogpFile(values, np.ones_like(values), False)
    return LogpFile(values, as_matrix(mask, f"response_mask of {path}"), True)


def _sequences(path: Path, contents: list[Any]) -> LogpFile:
    """Return the sequences of a file that gives each as an object or a list."""
    entries = [_rows(path, content, line=True) for content in contents]
    masks = [mask[0] for _, mask in entries if mask is not None]
    if masks and len(masks) < len(entries):
        raise NumericsError(f"{path} has response_mask in some sequences only; fix: give it in each")
    return _ragged(path, [rows[0] for rows, _ in entries], masks or None)


def _rows(path: Path, content: Any, line: bool = False) -> tuple[list[Any], list[Any] | None]:
    """Return the rows of values and of the mask. line: one sequence."""
    if isinstance(content, list):
        values, mask = content, None
    elif isinstance(content, dict):
        values, mask = _wanted(path, content), _named(path, content, MASK_NAMES)
    else:
        raise NumericsError(f'{path} holds no log-probabilities; fix: save {{"log_probs": [[...]]}}')
    if line or not (isinstance(values, list) and values and isinstance(values[0], list)):
        return [values], None if mask is None else [mask]
    return values, mask


def _wanted(path: Path, found: Any) -> Any:
    values = _named(path, found, LOGP_NAMES)
    if values is None:
        raise NumericsError(f"{path} has no log_probs; fix: save them as one of {', '.join(LOGP_NAMES)}")
    return values


def _named(path: Path, found: Any, names: Sequence[str]) -> Any:
    present = [name for name in names if name in found]
    if len(present) > 1:
        raise NumericsError(f"{path} has {' and '.join(present)}; fix: save one of them")
    return found[present[0]] if present else None


def _ragged(path: Path, rows: list[Any], masks: list[Any] | None) -> LogpFile:
    """Pad sequences to one length. The padding is outside the mask."""
    values = [np.asarray(row, dtype=np.float64) for row in rows]
    chosen = [np.asarray(row, dtype=np.float64) for row in masks or [np.ones(row.shape) for row in values]]
    if not values or any(row.ndim != 1 for row in [*values, *chosen]):
        raise NumericsError(f"{path} holds no sequences of numbers; fix: save one list of numbers a sequence")
    if [len(row) for row in values] != [len(row) for row in chosen]:
        raise NumericsError(
            f"{path}: response_mask has other lengths than log_probs; fix: save one value a token"
        )
    width = max(map(len, values))
    padded = [np.stack([np.pad(row, (0, width - len(row))) for row in part]) for part in (values, chosen)]
    return LogpFile(padded[0], padded[1], masks is not None)

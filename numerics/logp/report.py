"""Show a logp_diff: terminal and logp_diff.json."""

from __future__ import annotations

from typing import Any

from numerics.dump_files import finite
from numerics.logp.diff import WITHIN, LogpDiff, TokenDiff
from pages.document import Block, BulletList, Document, Paragraph, Table
from pages.markup import Text

MOST_ROWS = 20  # of sequences in the table


def report(found: LogpDiff) -> Document:
    """Return the result as a document: the verdict, the first token over the threshold, a table of sequences."""
    lines: list[Text] = [
        f"logp_diff {found.value:.3g}: the mean over {len(found.sequences)} sequences of rollout - training; "
        f"threshold {found.threshold:g}",
        f"mean absolute difference {found.mean_absolute:.3g}",
        f"first response token (prefill alone) {found.first_token:.3g}, later tokens (decode) {found.decode:.3g}",
    ]
    if first := found.first:
        lines.append(
            f"first token over the threshold: sequence {first.sequence}, response token {first.response} (position "
            f"{first.position}): rollout {first.rollout:.6g}, training {first.training:.6g}"
        )
    rows = [
        [
            str(number),
            str(one.tokens),
            f"{one.mean:.3g}",
            f"{one.mean_absolute:.3g}",
            f"{one.maximum:.3g}",
            str(one.first.response) if one.first else "none",
        ]
        for number, one in enumerate(found.sequences[:MOST_ROWS])
    ]
    headings = ["Sequence", "Tokens", "Mean", "Mean absolute", "Maximal", "First token over"]
    left_out = len(found.sequences) - len(rows)
    blocks: list[Block] = [
        BulletList(lines),
        Table(headings, rows),
        Paragraph(f"{left_out} more sequences are in logp_diff.json." if left_out else ""),
        Paragraph(next_step(found)),
    ]
    return Document(f"logp_diff: {found.verdict}", blocks)


def next_step(found: LogpDiff) -> str:
    """Return what to do next (sections 2.3.3.5.1 and 2.3.3.5.2)."""
    if found.verdict == WITHIN:
        return "Next: nothing to do; go on with the training (section 2.3.3)."
    if found.exceeds and not abs(found.first_token) <= found.threshold:
        return "Next: the prefill differs already: record both forward passes on one sequence and compare the records."
    return "Next: only decoding differs: check how the KV cache is cleared, written and read."


def as_json(found: LogpDiff) -> dict[str, Any]:
    """Return what logp_diff.json holds. Numbers that are not finite are null."""
    return {
        "verdict": found.verdict,
        "logp_diff": finite(found.value),
        "mean_absolute": finite(found.mean_absolute),
        "threshold": found.threshold,
        "first_token": finite(found.first_token),
        "decode": finite(found.decode),
        "first_over": _token(found.first),
        "sequences": [
            {
                "tokens": one.tokens,
                "mean": finite(one.mean),
                "mean_absolute": finite(one.mean_absolute),
                "maximum": finite(one.maximum),
                "first_over": _token(one.first),
            }
            for one in found.sequences
        ],
        "per_token": [[finite(value) for value in row] for row in found.per_token.tolist()],
    }


def _token(token: TokenDiff | None) -> dict[str, Any] | None:
    if token is None:
        return None
    return {
        "sequence": token.sequence,
        "position": token.position,
        "response": token.response,
        "rollout": finite(token.rollout),
        "training": finite(token.training),
    }

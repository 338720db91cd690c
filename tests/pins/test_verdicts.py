"""Verdicts on 2,000 simulated loss tables and on published losses have the pinned words and numbers.

`python -m tests.pins.test_verdicts --write` stores those of this version, in a commit of its own that says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from study.evaluation.transfer_matrix import judge_transfer
from tests.pins import pinned
from tests.pins.answers import all_rows, transfer_rows

FILE = "verdicts.tsv.gz"
PUBLISHED = Path(__file__).parents[2] / "docs/results/2026-11-23-cpu-aqn-transfer/transfer.json"


def test_verdicts_on_simulated_losses_are_the_pinned_ones() -> None:
    found = pinned.differences(FILE, all_rows())
    assert not found, f"{len(found)} rows differ, such as: {found[:5]}"


def test_the_published_transfer_study_has_the_same_verdicts_from_its_losses() -> None:
    content = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for row in content["matrix"]:
        losses.setdefault(row["platform"], {}).setdefault(row["arm"], {})[row["seed"]] = row["loss"]
    judged = judge_transfer(losses, content["home"], content["margin"])
    found = [(row.word, *row.numbers) for row in transfer_rows("", judged)]
    published = [
        (one["word"], one["test"]["difference"]["mean"], one["test"]["difference"]["low"], one["p_value"],
         one["p_outside"])
        for question in ("gaps", "shrinks", "costs")
        for one in content["verdicts"][question]
    ]  # fmt: skip
    assert [one[0] for one in found] == [one[0] for one in published]
    for numbers, expected in zip(found, published, strict=True):
        assert numbers[1:] == pytest.approx(expected[1:], rel=pinned.CLOSE)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    pinned.write(FILE, all_rows())

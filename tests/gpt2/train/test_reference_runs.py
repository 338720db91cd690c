"""Runs agree with those of commit 8aabecd, so that studies from before and after a rewrite can be compared.

Losses are equal to the bit on the processor that recorded them. Another processor or torch may sum in another order, so
the tolerance is a few float32 roundings. Fingerprints are equal on every machine. The losses of RALEARN were recorded
after a change of its mix, which moved them by less than that (docs/results/README.md).
"""

import json
from pathlib import Path

import pytest

from gpt2.config.vocabulary import GPT2
from tests import small_runs

REFERENCE = json.loads((Path(__file__).parents[2] / "fixtures" / "reference_runs.json").read_text())["runs"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_losses_and_fingerprints_are_those_of_the_reference(name: str, tmp_path: Path, texts: Path) -> None:
    small_runs.start(tmp_path, small_runs.configuration(texts, 8, ids=GPT2), name).train()
    _, recorded, losses = small_runs.outcome(tmp_path)
    expected = REFERENCE[name]
    assert [loss for _, loss in losses] == pytest.approx(expected["losses"], rel=2e-6)
    assert [tokens for tokens, _ in recorded["losses"]] == [tokens for tokens, _ in expected["validation"]]
    assert [loss for _, loss in recorded["losses"]] == pytest.approx(
        [loss for _, loss in expected["validation"]], rel=2e-6
    )
    fingerprint = {
        key: value
        for key, value in recorded["fingerprint"].to_json().items()
        if key not in ("data", "numbers")
    }
    assert fingerprint == expected["fingerprint"]

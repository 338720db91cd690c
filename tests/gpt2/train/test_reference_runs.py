"""Runs agree with those of commit 8aabecd, so that studies from before and after a rewrite can be compared.

Losses are equal to the bit on the processor that recorded the fixture. Another processor or torch may sum in another
order, so the tolerance is a few float32 roundings. Fingerprints are equal on every machine.
"""

import json
from pathlib import Path

import pytest
import torch

from tests import small_runs
from tests.gpt2.train.test_trainer import configuration, make, outcome

REFERENCE = json.loads((Path(__file__).parents[2] / "fixtures" / "reference_runs.json").read_text())["runs"]


@pytest.mark.parametrize("name", sorted(REFERENCE))
def test_losses_and_fingerprints_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make(tmp_path / name, configuration(small_runs.write_texts(tmp_path / "texts")), name).train()
    finally:
        torch.set_num_threads(threads)
    _, recorded, losses = outcome(tmp_path / name)
    expected = REFERENCE[name]
    assert [loss for _, loss in losses] == pytest.approx(expected["losses"], rel=2e-6)
    assert [tokens for tokens, _ in recorded["losses"]] == [tokens for tokens, _ in expected["validation"]]
    assert [loss for _, loss in recorded["losses"]] == pytest.approx(
        [loss for _, loss in expected["validation"]], rel=2e-6
    )
    fingerprint = {key: value for key, value in recorded["fingerprint"].to_json().items() if key != "data"}
    assert fingerprint == expected["fingerprint"]

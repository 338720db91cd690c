"""A variant that hangs, crashes or cannot be loaded ends its examination with one message."""

from pathlib import Path

import pytest

from ra import arms
from ra.admission.process import examine_variants
from runtime.settings import AlternationSettings, ModelConfig
from tests.pins.admission import hold_to_pin

STUDY = ModelConfig("test", 2, 2, 16, 16, 0.0)
ALTERNATION = AlternationSettings("output", 0.5, 100.0)
REFUSED = ("CRASHES", "EXITS")
ATTENTION = """
import os, sys, time
from gpt2.transformer import CausalSelfAttention

class Custom(CausalSelfAttention):
    def attend(self, q, k, v):
        {line}
        return self.fused(q, k, v)

def attention(layer, spec):
    return Custom(spec.width, spec.heads, spec.dropout)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path)
    return tmp_path


def test_a_crash_and_a_hang_are_named_and_the_others_are_still_examined(folder: Path) -> None:
    (folder / "crashes.py").write_text(ATTENTION.format(line="os.abort()"))
    (folder / "exits.py").write_text(ATTENTION.format(line="os._exit(7)"))
    (folder / "fine.py").write_text(ATTENTION.format(line="print('output of the user')"))
    found = examine_variants(["CRASHES", "FINE", "EXITS"], STUDY, ALTERNATION)
    for examination in found.values():
        hold_to_pin(examination)
    assert "killed by SIGABRT" in found["CRASHES"].violations[0].message
    assert "ended with status 7" in found["EXITS"].violations[0].message
    assert found["FINE"].violations == ()
    assert {outcome.result for outcome in found["FINE"].outcomes} == {"passed"}


def test_a_hang_ends_at_the_time_limit(folder: Path) -> None:
    (folder / "hangs.py").write_text(ATTENTION.format(line="time.sleep(1000)"))
    found = examine_variants(["HANGS"], STUDY, ALTERNATION, seconds=5)
    assert found["HANGS"].violations[0].message == "it gave no result within the time limit of 5 s"

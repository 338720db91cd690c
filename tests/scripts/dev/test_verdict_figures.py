"""The figures of docs/verdicts.md are drawn, and the committed ones have the same axes and lines."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scripts.dev import verdict_figures

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"


def test_the_figures_are_valid_and_have_the_words_of_the_committed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_figures, "STUDIES", 200)
    monkeypatch.setattr("sys.argv", ["verdict_figures", str(tmp_path)])
    assert verdict_figures.main() == 0
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.name for path in drawn] == sorted(path.name for path in PICTURES.glob("verdict-*.svg"))
    for path in drawn:
        words = [[text.text for text in ElementTree.parse(one).getroot() if text.tag.endswith("text")]
                 for one in (path, PICTURES / path.name)]  # fmt: skip
        assert words[0] == words[1]

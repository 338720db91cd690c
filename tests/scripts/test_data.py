"""`make data` has the refusals of `make`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpt2.hellaswag import HellaSwagError
from gpt2.text_sources import DataError
from scripts import data
from tests.hellaswag_items import FIXTURE
from tests.kconfig_commands import defconfig

SMOKE = "gpt2-ra-ablation-smoke"
pytestmark = pytest.mark.usefixtures("elsewhere")


def configured(text: str = "All work and some play. " * 4000) -> Path:
    """Write a .config with local text and local HellaSwag items; return the file of items."""
    Path("story.txt").write_text(text)
    items = Path("items.jsonl")
    shutil.copy(FIXTURE, items)
    defconfig(
        "CONFIG_DATASET_FILES=story.txt", "CONFIG_HELLASWAG_FILE=items.jsonl", "CONFIG_HELLASWAG_LIMIT=0",
        "CONFIG_DATASET_EMBEDDED=n", spec=SMOKE,
    )  # fmt: skip
    return items


def test_a_broken_hellaswag_file_is_refused_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    items = configured()
    assert data.main() == 0
    assert f"HellaSwag: items.jsonl: {len(items.read_bytes().splitlines())} items" in capsys.readouterr().out
    items.write_text(items.read_text() + "{}\n")
    with pytest.raises(HellaSwagError, match=r"items\.jsonl:\d+: "):
        data.main()


def test_a_corpus_shorter_than_a_sequence_is_refused_with_the_amount_of_text_needed() -> None:
    configured("All work and some play. " * 10)
    with pytest.raises(DataError, match="use at least 2,600 tokens of text, about 3 kB"):
        data.main()

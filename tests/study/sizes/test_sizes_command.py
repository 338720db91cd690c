"""`make` with two sizes: it continues after a stop, and a second `make` runs nothing."""

import json
from pathlib import Path

import pytest

from gpt2.artifacts import run_record
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories

pytestmark = pytest.mark.slow


def test_two_sizes_run_stop_continue_and_are_reported(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = write_stories(tmp_path_factory.mktemp("texts"))
    place = Workplace(
        tmp_path, texts, VARIANTS="B RALEARN", SIZES="mini tiny", STUDY_NAME="s", GPT2_MAX_ITERS="8"
    )
    results = tmp_path / "results"
    # the larger size cannot start: the smaller one is finished all the same
    (results / "s-mini").mkdir(parents=True)
    (results / "s-mini" / "config").write_text("CONFIG_GPT2_HARD_LIMIT=1\n")
    refused = train(place)
    assert refused.returncode == 1
    assert "s-mini has another configuration" in refused.stdout
    assert "s-mini has no judged run yet" in (results / "s" / "sizes.md").read_text()
    (results / "s-mini" / "config").unlink()
    done = train(place)
    assert done.returncode == 0, done.stdout
    assert "nothing to run: all 2 runs of s-tiny are finished" in done.stdout
    rows = json.loads((results / "s" / "sizes.json").read_text())["rows"]
    counts = {}
    for size in ("tiny", "mini"):
        record = run_record.load(results / f"s-{size}" / "runs" / "B0")
        counts[size] = record.parameters
        assert record.status == "finished"
    assert [(row["size"], row["parameters"]) for row in rows] == [*counts.items()]
    again = place.here("scripts.study")
    assert again.returncode == 0
    assert again.stdout.count("nothing to run") == 2
    page = (results / "s" / "sizes.html").read_bytes()
    (results / "s" / "sizes.html").unlink()
    assert place.here("scripts.report").returncode == 0
    assert (results / "s" / "sizes.html").read_bytes() == page

"""A run that is made longer: the held-out texts of both lengths are saved, and never mixed."""

import dataclasses
from pathlib import Path

import pytest

from gpt2.artifacts import eval_sets, run_record
from gpt2.config.eval_sets import EvalSet
from study.report import build
from tests import small_runs
from tests.study.extended import FIRST, Place, configuration

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_texts_of_both_lengths_are_saved(tmp_path: Path) -> None:
    config = configuration(small_runs.write_texts(tmp_path / "texts"))
    sets = (EvalSet("news", str(tmp_path / "texts/0*.txt")),)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, sets=sets))
    place = Place(tmp_path / "extended", config, ("B",))
    assert place.run("B") == "finished"
    shorter = run_record.load(place.folder("B")).eval_sets["news"]
    place.extend("2")
    assert not (place.folder("B") / eval_sets.FILE).exists()
    assert eval_sets.read(place.folder("B") / f"eval_sets-{FIRST}.json", "B0", FIRST)["news"].entry == shorter
    (table,) = build.build_report(place.directory).eval_sets.tables
    assert table.rows[0].loss.mean == shorter.loss
    assert place.run("B") == "finished"
    longer = run_record.load(place.folder("B")).eval_sets["news"]
    assert longer.loss != shorter.loss
    assert eval_sets.read(place.folder("B") / eval_sets.FILE, "B0", 2 * FIRST)["news"].entry == longer
    (table,) = build.build_report(place.directory).eval_sets.tables
    assert table.rows[0].loss.mean == longer.loss

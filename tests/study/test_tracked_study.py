"""A finished study sends its verdicts once, and an unfinished one sends none."""

from pathlib import Path

import pytest

from runtime import run_record
from study.study import Study
from study.trackers import verdict_values
from tests.fake_trackers import install, observed
from tests.faults.in_process import train
from tests.faults.workplace import Workplace, write_stories


def test_the_last_report_of_a_study_sends_the_verdicts(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_stories(tmp_path_factory.mktemp("texts"))
    changes = {"VARIANTS": "B RALEARN", "SEEDS": "1", "GPT2_MAX_ITERS": "4", "EVAL_INTERVAL_TOKENS": "64"}
    place = Workplace(tmp_path_factory.mktemp("place"), texts, WANDB="y", WANDB_MODE="online", **changes)
    install(tmp_path / "fakes", monkeypatch)
    done = train(place)
    assert done.returncode == 0, done.stdout
    assert run_record.load(place.run_dir("RALEARN0")).status == "finished"
    names = [call[1]["name"] for call in observed() if call[0] == "init"]
    assert sorted(names) == ["B0", "RALEARN0", "verdict"]
    assert {call[1]["group"] for call in observed() if call[0] == "init"} == {place.study.name}
    values = [call[1] for call in observed() if call[0] == "summary"][-1]
    assert values == verdict_values(place.study)
    assert values["verdict/RALEARN/seeds"] == 1
    place.configure(WANDB="y", WANDB_MODE="online", **changes | {"SEEDS": "2"})
    with monkeypatch.context() as patch:  # no run is executed, so the verdict is interim
        patch.setattr(Study, "execute_pending", lambda study, plan: plan)
        assert train(place).returncode == 1
    assert verdict_values(place.study)["verdict/RALEARN/word"] == "interim"
    assert len([call for call in observed() if call[0] == "init"]) == 3

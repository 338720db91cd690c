"""A study is configured without the user's .config."""

from pathlib import Path

import pytest

from bench.temporary_studies import configure_study


def test_a_study_is_configured_in_a_folder_and_the_users_config_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = configure_study(tmp_path / "place", "gpt2-ra-ablation-smoke", SEEDS="3")
    assert study.directory == tmp_path / "place" / "results" / "gpt2-ra-ablation-smoke"
    assert study.settings.seeds == 3
    assert not (tmp_path / ".config").exists()

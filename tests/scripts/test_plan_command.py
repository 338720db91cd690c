"""The command line of `make plan`."""

import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from scripts.plan import main, spread
from tests.kconfig_commands import defconfig


def test_the_command_prints_the_plan_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts.plan"])
    monkeypatch.setenv("RA_DETECTED", "cpu")
    with pytest.raises(UserError, match="fix: make defconfig"):
        main()
    defconfig("CONFIG_GPT2_MODEL_TINY=y", "CONFIG_TARGET_CPU=y", spec="ra-lean")
    before = sorted(path.name for path in tmp_path.iterdir())
    capsys.readouterr()
    monkeypatch.setenv("MAKEFLAGS", " -- SPREAD=0.5")
    main()
    text = capsys.readouterr().out
    assert text.startswith("ra-lean: ")
    assert "(1 + 1) x 7 = 14" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("text", ["0", "nan"])
def test_another_text_is_refused_in_one_line_that_names_the_fix(text: str) -> None:
    with pytest.raises(UserError, match=r"fix: make plan SPREAD=0\.5") as caught:
        spread(text)
    assert "\n" not in str(caught.value)

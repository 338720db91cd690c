"""`make control` shows its progress and fails where the curves differ."""

from __future__ import annotations

import pytest

from ra import control as equivalence
from scripts.dev import control
from tests.kconfig_commands import defconfig

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_each_training_is_announced_before_it_starts_and_a_difference_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defconfig(spec="gpt2-ra-ablation-smoke")
    announced: list[str] = []

    def losses(name: str, *arguments: object, steps: int, swap: bool, **settings: object) -> list[float]:
        announced.append(capsys.readouterr().out.splitlines()[-1])
        return [1.0 + (name == "RALATE") * 0.1] * steps

    monkeypatch.setattr(equivalence, "losses", losses)
    assert control.main() == 1
    assert len(announced) == 5
    assert announced[3].startswith("training 4 of 5: RALATE")
    output = capsys.readouterr().out
    assert output.count("coincides with B") == 2
    assert "1.00e-01: DIFFERS" in output

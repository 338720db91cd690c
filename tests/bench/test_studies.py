"""Studies of `make card`: a stop, and the comparison of losses."""

from pathlib import Path

import pytest

from bench import card_studies as studies
from bench.card_checks import CheckedDevice
from runtime.resolved_target import resolve
from runtime.settings import ANY_TARGET


@pytest.fixture
def card(tmp_path: Path) -> CheckedDevice:
    return CheckedDevice(resolve(ANY_TARGET), tmp_path)


@pytest.mark.parametrize(
    ("resumed", "limit", "verdict", "measured"),
    [
        ([3.0, 2.0], 0.0, "pass", "equal to the bit"),
        ([3.0, 2.5], 0.0, "differs", "largest difference 5.0e-01 nats; equal to the bit before step 2"),
        ([3.0, 2.5], 0.6, "pass", "largest difference 5.0e-01 nats; equal to the bit before step 2"),
        ([3.0], 0.6, "differs", "2 and 1 losses"),
    ],
)
def test_losses_are_compared(
    card: CheckedDevice,
    monkeypatch: pytest.MonkeyPatch,
    resumed: list[float],
    limit: float,
    verdict: str,
    measured: str,
) -> None:
    found = {studies.UNDISTURBED: [3.0, 2.0], studies.STOPPED: resumed}
    monkeypatch.setattr(studies, "STEPS", 2)
    monkeypatch.setattr(studies, "losses", lambda card, label, name: found[label])
    line = studies.compare_losses(card, "losses", studies.STOPPED, "B", limit)
    assert (line.verdict, line.measured) == (verdict, measured)

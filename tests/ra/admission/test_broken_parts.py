"""Every broken norm, MLP and position is refused for its own reason, with its file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ra import arms
from ra.admission.examine import examine
from ra.admission.probe import Probe
from runtime.settings import AlternationSettings, ModelConfig
from tests.pins.admission import hold_to_pin
from tests.ra.admission.broken_parts import BROKEN_PARTS
from tests.ra.admission.first_checks import checks_to

STUDY = ModelConfig("test", 3, 2, 32, 160, 0.0)
ALTERNATION = AlternationSettings("output", 0.5, 100.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of custom variants with one broken part each."""
    folder = tmp_path_factory.mktemp("parts")
    for name, kind in BROKEN_PARTS.items():
        part: Any = vars(kind).get("part") or kind.__mro__[1].part  # type: ignore[attr-defined]
        arguments = "spec" if part == "position" else "layer, spec"
        (folder / f"{name.lower()}.py").write_text(
            f"from tests.ra.admission.broken_parts import {kind.__name__} as kind\n\n\n"
            f"def {part}({arguments}):\n    return kind(spec{', layer' if part == 'norm' else ''})\n"
        )
    patch = pytest.MonkeyPatch()
    patch.setattr(arms, "CUSTOM_FOLDER", folder)
    patch.setattr("ra.custom.__path__", [str(folder)])
    yield folder
    patch.undo()


def arm_of(name: str, attention: str) -> str:
    """Return the arm of a broken part: with this attention, or alone."""
    part = BROKEN_PARTS[name].part  # type: ignore[attr-defined]
    return f"{attention}+{part.upper()}={name.lower()}" if attention and part != "attention" else name


@pytest.mark.parametrize("attention", ["", "RALEARN"])
@pytest.mark.parametrize("name", BROKEN_PARTS)
def test_a_broken_part_is_refused_for_its_reason(
    folder: Path, name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = BROKEN_PARTS[name]
    monkeypatch.setattr("ra.admission.examine.CHECKS", checks_to(kind.fails))
    found = examine(Probe(arm_of(name, attention), STUDY, ALTERNATION))
    hold_to_pin(found)
    assert found.violations, "admitted"
    first = found.violations[0]
    assert first.check == kind.fails, str(first)
    assert "broken_parts.py" in first.where, str(first)
    assert first.fix
    assert "\n" not in str(first)


def test_an_attention_that_forgets_the_rotation_is_refused_with_rotary_positions_alone(folder: Path) -> None:
    (folder / "unrotated.py").write_text(
        "from tests.ra.admission.broken_parts import UnrotatedAttention\n\n\n"
        "def attention(layer, spec):\n    return UnrotatedAttention(spec)\n"
    )
    hold_to_pin(examine(Probe("UNROTATED", STUDY, ALTERNATION)))
    rotary = examine(Probe("UNROTATED+POSITION=rotary", STUDY, ALTERNATION))
    hold_to_pin(rotary)
    (found,) = rotary.violations
    assert (found.check, found.layer) == ("length", 0)
    assert "does not rotate its queries and keys" in found.message
    assert "self.positioned(q, k)" in found.fix

"""Every broken attention is refused for its own reason, and no correct one is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ra import arms
from ra.admission.examine import examine
from ra.admission.probe import Probe
from ra.admission.process import examine_variants
from runtime.settings import AlternationSettings, ModelConfig
from tests.pins.admission import hold_to_pin
from tests.ra.admission import broken, correct
from tests.ra.admission.conditional import CONDITIONAL, UNUSUAL
from tests.ra.admission.first_checks import checks_to

BROKEN = broken.BROKEN | CONDITIONAL
CORRECT = correct.CORRECT | UNUSUAL
STUDY = ModelConfig("test", 3, 2, 32, 160, 0.0)
SHALLOW = ModelConfig("test", 2, 2, 32, 160, 0.0)  # an even and an odd layer, the first and the last
WIDE = ModelConfig("test", 2, 8, 320, 160, 0.0)  # the small model has six of its heads
ALTERNATION = AlternationSettings("output", 0.5, 100.0)
SEPARATE = "HASHOFASTRING"  # only a second process shows it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of custom variants that holds the corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, variant in (BROKEN | CORRECT).items():
        make = (
            "kind.make(layer, spec)"
            if hasattr(variant, "make")
            else "kind(spec.width, spec.heads, spec.dropout)"
        )
        text = f"from {variant.__module__} import {variant.__name__} as kind\n\n\n"
        (folder / f"{name.lower()}.py").write_text(f"{text}def attention(layer, spec):\n    return {make}\n")
    patch = pytest.MonkeyPatch()
    patch.setattr(arms, "CUSTOM_FOLDER", folder)
    patch.setattr("ra.custom.__path__", [str(folder)])
    yield folder
    patch.undo()


def probe_of(name: str, kind: type, otherwise: ModelConfig) -> Probe:
    study = WIDE if getattr(kind, "wide", False) else otherwise
    return Probe(name, study, ALTERNATION, getattr(kind, "autocast", False))


WHOLE = {
    kind.fails: name for name, kind in BROKEN.items()
}.values()  # one of each check: no later check stops it


@pytest.mark.parametrize("name", [name for name in BROKEN if name != SEPARATE])
def test_a_broken_attention_is_refused_for_its_reason(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in WHOLE:
        monkeypatch.setattr("ra.admission.examine.CHECKS", checks_to(BROKEN[name].fails))
    found = examine(probe_of(name, BROKEN[name], STUDY))
    hold_to_pin(found)
    assert found.violations, "admitted"
    first = found.violations[0]
    assert first.check == BROKEN[name].fails, str(first)
    assert first.message
    assert first.fix
    assert first.line, str(first)
    assert "\n" not in str(first)


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_attention_is_admitted(folder: Path, name: str) -> None:
    found = examine(probe_of(name, CORRECT[name], SHALLOW))
    hold_to_pin(found)
    assert found.violations == ()
    assert {outcome.result for outcome in found.outcomes} == {"passed"}


def test_a_difference_between_two_processes_is_found(folder: Path) -> None:
    found = examine_variants([SEPARATE, "LEARNEDTEMPERATURE"], STUDY, ALTERNATION)
    hold_to_pin(found[SEPARATE])
    hold_to_pin(found["LEARNEDTEMPERATURE"])
    assert [violation.check for violation in found[SEPARATE].violations] == ["process"]
    assert "scale" in found[SEPARATE].violations[0].message
    assert found["LEARNEDTEMPERATURE"].violations == ()

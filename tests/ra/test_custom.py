"""Test custom variants: the documented example works unchanged, and one line names a broken file."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from ra import arms
from ra.admission.examine import examine
from ra.admission.probe import Probe
from ra.variants import Variant, variant
from runtime.settings import AlternationSettings, ModelConfig
from tests.pins.admission import hold_to_pin

PAGE = (Path(__file__).parents[2] / "docs/variants.md").read_text(encoding="utf-8")
MODEL = ModelConfig("test", 2, 2, 16, 16, 0.0)
DOCUMENTED = ("PLAIN", "RALEARN+MLP=plain", "B+POSITION=plain+NORM=plain+LR=2e-3")
fresh = (f"custom_variant_{number}" for number in itertools.count())  # a module is imported once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace ra/custom by an empty folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", folder)
    monkeypatch.setattr("ra.custom.__path__", [str(folder)])
    return folder


def build(folder: Path, text: str) -> Variant:
    name = next(fresh)
    (folder / f"{name}.py").write_text(text)
    return variant(name.upper(), MODEL, AlternationSettings("output", 0.5, 100.0))


def example() -> str:
    found = re.search(r"`ra/custom/\w+\.py`.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_the_documented_example_trains_and_computes_its_formula(folder: Path) -> None:
    chosen = build(folder, example())
    model = GPT2(
        layers=2,
        heads=2,
        width=16,
        block_size=16,
        vocabulary=97,
        padded_vocabulary=128,
        parts=chosen.parts,
    )
    initialise(model, 0)
    ids = torch.arange(16)[None] % 97
    model(ids).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind()
    scores = (q @ k.abs().transpose(-1, -2) / 8**0.5).masked_fill(
        torch.ones(16, 16).triu(1).bool(), -torch.inf
    )
    assert torch.allclose(chosen.parts.attention(0).attend(q, k, v), scores.softmax(-1) @ v, atol=1e-6)


def test_the_documented_parts_are_admitted_alone_and_with_other_attentions(folder: Path) -> None:
    found = re.search(r"`ra/custom/plain\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    (folder / "plain.py").write_text(found[1])
    settings = AlternationSettings("output", 0.5, 100.0)
    for name in DOCUMENTED:
        hold_to_pin(examine(Probe(name, MODEL, settings)))
    assert variant("PLAIN", MODEL, settings).recipe == {"learning_rate": 1e-3, "weight_decay": 0.05}
    assert variant("PLAIN+LR=2e-3", MODEL, settings).recipe["learning_rate"] == 2e-3
    assert variant("RALEARN+MLP=plain", MODEL, settings).recipe == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def attention(layer, spec) return 1\n", r"line 1: SyntaxError: expected ':'"),
        ("x = 1\n", "TypeError: it defines none of attention, norm, mlp, position and recipe"),
        ("def attention(layer, spec):\n    return 1\n", r"TypeError: attention\(0, spec\) returned int"),
        (
            "def attention(layer, spec):\n    y = 0\n    return spec.widht\n",
            "line 3: AttributeError: .*widht",
        ),
        ("import sys\nsys.exit()\n", "line 2: SystemExit"),
        ("def attention(layer, spec):\n    raise SystemExit(0)\n", "line 2: SystemExit"),
    ],
)
def test_a_broken_file_is_named_with_its_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(arms.VariantError, match=message) as caught:
        build(folder, text)
    assert re.match(r"CUSTOM_VARIANT_\d+: ra/custom/custom_variant_\d+\.py", str(caught.value))
    assert "\n" not in str(caught.value)

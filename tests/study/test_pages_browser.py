"""compare.html and attention.html in a real browser: nothing goes wrong, all is drawn, nothing overflows a phone."""

import shutil
from pathlib import Path

import pytest
import torch

from ra import maps
from study import compare
from study.attention import Seen, Text, Trained
from study.attention_html import page
from tests.study.test_compare import a_study, published, recorded
from tests.study.test_html_browser import BROWSER, faultless

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]


def as_report(folder: Path, name: str) -> Path:
    """The page under the name that the watch opens."""
    shutil.copy(folder / name, folder / "report.html")
    return folder


@pytest.mark.parametrize("phone", [False, True])
def test_a_comparison_is_drawn_and_fits(tmp_path: Path, phone: bool) -> None:
    other = recorded(
        "target", "device", to="another card of a rather long name, 48 GB, in the other building"
    )
    studies = [a_study(tmp_path / "one"), a_study(tmp_path / "two", other, noise=1, shift=0.01)]
    compare.write(compare.build(studies), tmp_path / "out")
    seen = faultless(as_report(tmp_path / "out", "compare.html"), phone=phone)
    assert {"changes", "curves0"} == set(seen["drawn"])
    assert seen["width"][0] <= seen["width"][1]


def test_the_published_study_is_drawn_without_its_curves(tmp_path: Path) -> None:
    compare.write(compare.build(published(tmp_path)), tmp_path / "out")
    seen = faultless(as_report(tmp_path / "out", "compare.html"), phone=True)
    assert set(seen["drawn"]) == {"changes"}
    assert seen["width"][0] <= seen["width"][1]


def a_run(name: str, variant: str, share: float) -> Seen:
    """Two layers of four heads on 60 tokens."""
    layers = {}
    for layer in range(2):
        query, key = torch.randn(2, 4, 60, 8, generator=torch.Generator().manual_seed(layer))
        layers[layer] = maps.measure(query, key, [0])
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    run = Trained(name, variant, 0, 1, None, model, [share] * 2, [])  # type: ignore[arg-type]
    return Seen(run, layers)


@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.parametrize("tokens", [60, 40])
def test_the_pictures_of_attention_are_drawn_and_fit(tmp_path: Path, phone: bool, tokens: int) -> None:
    runs = [a_run("B0", "B", 0.0), a_run("RAALL0", "RAALL", 1.0)]
    for run in runs:
        for layer in run.layers.values():
            layer.pictures = {0: tuple(path[:tokens, :tokens] for path in layer.pictures[0])}  # type: ignore[misc]
    (tmp_path / "attention.html").write_text(page(runs, Text(list(range(1000, 1000 + tokens)), "numbers")))
    seen = faultless(as_report(tmp_path, "attention.html"), phone=phone)
    assert set(seen["drawn"]) == {"layers", "map0-0", "map1-0"}
    assert seen["width"][0] <= seen["width"][1]

"""compare.html and attention.html in a real browser: nothing goes wrong, all is drawn, nothing overflows a phone."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ra import maps
from study import compare, report
from study.attention import READABLE, layer_look
from study.attention_data import Look, Text, write_study
from study.attention_html import page
from tests.study import records
from tests.study.browser import BROWSER, faultless
from tests.study.test_compare import a_study, published, recorded

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]


def as_report(folder: Path, name: str) -> Path:
    """The page under the name that the watch opens."""
    shutil.copy(folder / name, folder / "report.html")
    return folder


def percent(difference: float) -> float:
    return 100 * math.expm1(difference)


def stands_as_recorded(seen: dict[str, Any], made: dict[str, Any]) -> None:
    """Every change of compare.json and its interval, where it has one, is drawn, to the pixel."""
    columns = [row["differences"] for row in made["absolute"]]
    columns = columns or [row["against_baseline"] for row in made["relative"]]
    names = [row["variant"] for row in made["absolute"] or made["relative"]]
    traces = seen["drawn"]["changes"]
    assert len(traces) == len(columns[0])
    for trace, intervals in zip(traces, zip(*columns, strict=True), strict=True):
        pixel = trace["pixel"][0]
        assert trace["y"] == names
        middle = [percent(one["mean"]) for one in intervals]
        assert trace["x"] == pytest.approx(middle, rel=1e-5)
        assert [x for x, _ in trace["points"]] == pytest.approx(middle, abs=pixel)
        bars = [[percent(one[end]) for end in ("low", "high")] for one in intervals if one["low"] is not None]
        assert trace["errors"] == [pytest.approx(bar, abs=pixel) for bar in bars]


@pytest.mark.parametrize("phone", [False, True])
def test_a_comparison_is_drawn_and_fits(tmp_path: Path, phone: bool) -> None:
    other = recorded(
        "target", "device", to="another card of a rather long name, 48 GB, in the other building"
    )
    studies = [a_study(tmp_path / "one"), a_study(tmp_path / "two", other, noise=1, shift=0.01)]
    compare.write(compare.build(studies), tmp_path / "out")
    seen = faultless(as_report(tmp_path / "out", "compare.html"), phone=phone)
    assert {"changes", "curves0"} == set(seen["drawn"])
    made = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert made["absolute"]
    stands_as_recorded(seen, made)
    curves = {trace["name"]: trace for trace in seen["drawn"]["curves0"]}
    assert all(trace["marks"] for trace in curves.values())
    for line in made["alignments"]:
        assert curves[line["run"]]["x"] == [int(step) for step in line["curve"]]
        assert curves[line["run"]]["y"] == pytest.approx([100 * e for e in line["curve"].values()], rel=1e-3)
    assert seen["width"][0] <= seen["width"][1]


def test_the_published_study_is_drawn_without_its_curves(tmp_path: Path) -> None:
    compare.write(compare.build(published(tmp_path)), tmp_path / "out")
    seen = faultless(as_report(tmp_path / "out", "compare.html"), phone=True)
    assert set(seen["drawn"]) == {"changes"}
    made = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert not made["absolute"]
    stands_as_recorded(seen, made)
    assert seen["width"][0] <= seen["width"][1]


def a_look(name: str, variant: str, share: float, tokens: int) -> Look:
    """Two layers of four heads, pictures of head 0."""
    layers = {}
    for layer in range(2):
        query, key = torch.randn(2, 4, tokens, 8, generator=torch.Generator().manual_seed(layer))
        layers[layer] = layer_look(maps.measure(query, key, [0]), share)
    return Look(name, variant, 0, 1, 2, maps.pixel_tokens(tokens, maps.PIXELS), layers)


def a_text(tokens: int) -> Text:
    return Text("numbers", tokens, [str(number) for number in range(tokens)] if tokens <= READABLE else [])


@pytest.mark.parametrize("phone", [False, True])
@pytest.mark.parametrize("tokens", [60, 40])
def test_the_pictures_of_attention_are_drawn_and_fit(tmp_path: Path, phone: bool, tokens: int) -> None:
    looks = [a_look("B0", "B", 0.0, tokens), a_look("RAALL0", "RAALL", 1.0, tokens)]
    (tmp_path / "attention.html").write_text(page(looks, a_text(tokens)))
    seen = faultless(as_report(tmp_path, "attention.html"), phone=phone)
    assert set(seen["drawn"]) == {"layers", "map0-0", "map1-0"}
    assert seen["width"][0] <= seen["width"][1]


@pytest.mark.parametrize("phone", [False, True])
def test_a_report_shows_where_attention_goes(tmp_path: Path, phone: bool) -> None:
    study = records.a_study(tmp_path / "study")
    looks = [
        a_look(f"{name}0", name, share, 60) for name, share in (("B", 0.0), ("RAALL", 1.0), ("RALEARN", 0.4))
    ]
    write_study(study, looks, a_text(60))
    report.write(study)
    seen = faultless(study, phone=phone)
    assert {"attention-layers", "attention-map0", "attention-map1"} < set(seen["drawn"])
    assert seen["width"][0] <= seen["width"][1]

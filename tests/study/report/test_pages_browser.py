"""compare.html and attention.html in a real browser: nothing goes wrong, all is drawn, nothing overflows a phone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ra import attention_maps
from referee.pages.html_page import render_html
from study.compare import compare_page as write
from study.compare import compared_studies as compare
from study.evaluation import attention_page
from study.evaluation.attention_page import InputText, RunAttention
from study.evaluation.loaded_runs import TrainedRun
from tests.study import sample_records as records
from tests.study.browser import BROWSER, faultless, percent, printed
from tests.study.compared import a_study, recorded

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]


def as_report(folder: Path, name: str) -> Path:
    """The page under the name that the watch opens."""
    shutil.copy(folder / name, folder / "report.html")
    return folder


def changes_are_drawn(found: dict[str, Any], built: dict[str, Any]) -> None:
    """Every change of compare.json and its interval, where it has one, is drawn, to the pixel."""
    columns = [row["differences"] for row in built["absolute"]]
    columns = columns or [row["against_controls"] for row in built["relative"]]
    names = [row["variant"] for row in built["absolute"] or built["relative"]]
    traces = found["drawn"]["changes"]
    assert len(traces) == len(columns[0])
    for trace, intervals in zip(traces, zip(*columns, strict=True), strict=True):
        pixel = trace["pixel"][0]
        assert [round(-y) for y in trace["y"]] == [*range(len(names))]
        middle = [percent(one["mean"]) for one in intervals]
        assert trace["x"] == pytest.approx(middle, rel=1e-5)
        assert [x for x, _ in trace["points"]] == pytest.approx(middle, abs=pixel)
        bars = [[percent(one[end]) for end in ("low", "high")] for one in intervals if one["low"] is not None]
        assert trace["errors"] == [pytest.approx(bar, abs=pixel) for bar in bars]


def is_printed(found: dict[str, Any], built: dict[str, Any]) -> None:
    """Every interval of the main table is that of compare.json."""
    (table,) = (table for table in found["tables"] if table[0][0] == "variant" and "against" in table[0][-1])
    for cells, row in zip(table[1:], built["absolute"] or built["relative"], strict=True):
        assert cells[0].strip() == row["variant"]
        losses, changes = row.get("losses", []), row.get("differences") or row["against_controls"]
        for cell, interval in zip(cells[-len(losses + changes) :], losses + changes, strict=True):
            if interval is None or interval["low"] is None:
                assert "[" not in cell
            else:
                printed(cell, interval, interval in losses)


def test_a_comparison_is_drawn_and_fits_a_phone(tmp_path: Path) -> None:
    other = recorded(
        "target", "device", to="another card of a rather long name, 48 GB, in the other building"
    )
    studies = [a_study(tmp_path / "one"), a_study(tmp_path / "two", other, noise=1, shift=0.01)]
    write.write_comparison(compare.build_comparison(studies), tmp_path / "out")
    drawn = faultless(as_report(tmp_path / "out", "compare.html"), phone=True)
    assert {"changes", "curves0"} == set(drawn["drawn"])
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["absolute"]
    changes_are_drawn(drawn, content)
    is_printed(drawn, content)
    curves = {trace["name"]: trace for trace in drawn["drawn"]["curves0"]}
    assert all(trace["marks"] for trace in curves.values())
    for line in content["alignments"]:
        assert curves[line["run"]]["x"] == [int(step) for step in line["curve"]]
        assert curves[line["run"]]["y"] == pytest.approx([100 * e for e in line["curve"].values()], rel=1e-3)
    assert drawn["width"][0] <= drawn["width"][1]
    assert drawn["beyond"] == []


def a_run_attention(name: str, share: float, place: int) -> RunAttention:
    """Two layers of four heads on 60 tokens, pictures of head 0. place: no two runs are alike."""
    layers = {}
    for layer in range(2):
        query, key = torch.randn(2, 4, 60, 8, generator=torch.Generator().manual_seed(2 * place + layer))
        layers[layer] = attention_maps.layer_maps(query, key, [0])
    unused: Any = None
    return RunAttention(TrainedRun(f"{name}0", name, 0, 1, unused, unused, [share] * 2, []), layers)


THREE = (("B", 0.0), ("RAALL", 1.0), ("RALEARN", 0.4))


def with_attention(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run with the page of three runs, and run -> its attention.json."""
    study = records.a_study(folder, seeds=1, variants=("B",)) / "runs/B0"
    attentions = [a_run_attention(*arm, place) for place, arm in enumerate(THREE)]
    text = InputText("numbers", tuple(range(60)))
    found = {}
    for one in attentions:
        attention_page.write(study, one, text)
        found[one.run.name] = json.loads((study / "attention.json").read_text())
    (study / "report.html").write_text(render_html(attention_page.attention_document(attentions, text)))
    return study, found


Attended = tuple[Path, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> Attended:
    """Runs with attention maps, and their page as the browser showed it."""
    study, found = with_attention(tmp_path_factory.mktemp("attended") / "study")
    return study, found, faultless(study)


def test_a_page_shows_the_attention_maps_on_a_phone(attended: Attended) -> None:
    drawn = faultless(attended[0], phone=True)
    assert {"attention-layers", "attention-map0-0", "attention-map1-0"} <= set(drawn["drawn"])
    assert drawn["width"][0] <= drawn["width"][1]
    assert drawn["beyond"] == []


def test_attention_by_layer_is_drawn_at_the_numbers_of_attention_json(attended: Attended) -> None:
    _, runs, drawn = attended
    statistics = ("total_variation", "jensen_shannon", "entropy", "distance", "previous", "first")
    for place, name in enumerate(statistics):
        traces = {trace["name"]: trace for trace in drawn["switched"][f"attention-layers-0-{place}"]}
        assert len(traces) == 2 * len(runs)
        for run, one in runs.items():
            for path in ("standard", "reciprocal"):
                trace = traces[f"{run}, {path}"]
                found = [layer.get(f"{name}_{path}") for layer in one["layers"]]
                if None in found:  # one number for both paths: drawn once
                    found = [layer[name] for layer in one["layers"]]
                    if path == "reciprocal":
                        assert trace["points"] == []
                        continue
                means = [sum(heads) / len(heads) for heads in found]
                assert trace["y"] == pytest.approx(means, rel=1e-3)
                assert [y for _, y in trace["points"]] == pytest.approx(means, abs=2 * trace["pixel"][1])
                assert [x for x, _ in trace["points"]] == pytest.approx([0, 1], abs=trace["pixel"][0])

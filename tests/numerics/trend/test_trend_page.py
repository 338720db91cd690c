"""The codes of the page: exact order, no lost extreme; names are text; the size of a long run's page."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numerics.__main__ import main
from numerics.trend import page as trend_pages
from numerics.trend.pack import MINUS, NAN, PLUS, TOP, pack, scale_of
from tests.numerics.trend.monitor_files import HOSTILE, noisy, write_losses, write_monitor


def decode(text: str, single: bool, rows: int) -> list[np.ndarray]:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8).astype(np.uint16)
    planes = raw.reshape(2 if single else 4, -1)
    return [(planes[at] << 8 | planes[at + 1]).reshape(rows, -1) for at in range(0, len(planes), 2)]


@pytest.mark.parametrize("statistic", ["norm", "mean", "zeros"])
def test_codes_have_the_order_of_the_values_and_four_digits(statistic: str) -> None:
    generator = np.random.default_rng(0)
    values = generator.lognormal(0, 4, (5, 400)).astype(np.float32)
    if statistic == "mean":
        values *= generator.choice([-1, 1], values.shape)
    if statistic == "zeros":
        values = generator.random(values.shape).astype(np.float32)
    values[0, :2] = 0
    scale = scale_of(statistic, [values])
    codes = scale.codes(values, np.ones(values.shape, dtype=bool))
    order = np.argsort(values.ravel(), kind="stable")
    assert (np.diff(codes.ravel()[order].astype(int)) >= 0).all()
    assert codes.min() >= 1
    assert codes.max() == TOP
    points = scale.low + (codes - 1.0) / (TOP - 1) * (scale.high - scale.low)
    inverse = {"log": np.exp, "asinh": lambda x: scale.unit * np.sinh(x), "linear": lambda x: x}[scale.kind]
    near = np.abs(inverse(points) - values) <= 1e-3 * np.maximum(
        np.abs(values), scale.unit if scale.kind != "log" else 0
    )
    assert near[1:].all()


def test_no_extreme_is_lost_and_what_is_not_finite_wins() -> None:
    generator = np.random.default_rng(1)
    values = generator.lognormal(0, 1, (4, 1003)).astype(np.float32)
    present = generator.random(values.shape) < 0.7
    values[1, 500:503] = [np.nan, np.inf, -np.inf]
    present[1, 500:503] = True
    present[2, 70:84] = False
    codes = scale_of("norm", [values]).codes(values, present)
    for group in (1, 7):
        text, single = pack(codes, group)
        assert single == (group == 1)
        planes = decode(text, single, 4)
        for row in range(4):
            for at in range(planes[0].shape[1]):
                part = codes[row, at * group : (at + 1) * group]
                finite = part[(part > 0) & (part <= TOP)]
                assert planes[0][row, at] == part.max(initial=0)
                if not single:
                    assert planes[1][row, at] == (finite.min() if len(finite) else 0)
    assert codes[1, 500:503].tolist() == [NAN, PLUS, MINUS]


def page_data(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="trend-data">(.*?)</script>', page)
    return json.loads(text)


def test_names_end_no_script_and_the_page_loads_nothing(tmp_path: Path) -> None:
    norms = noisy(2, 80)
    norms[1, 70] = np.nan
    write_monitor(tmp_path / "a", norms, tensors=[f"h.{HOSTILE}", "<b>"])
    assert main(["trend", str(tmp_path / "a"), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/trend.html").read_text()
    assert "</script><img" not in page
    assert page.count("<script") == page.count("</script>")
    assert "http" not in page.replace("http-equiv", "")
    assert page_data(page)["kinds"][0]["names"] == [f"h.{HOSTILE}", "<b>"]


def test_a_page_over_the_bound_holds_extremes_of_groups_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trend_pages, "CELLS", 6000)
    norms = noisy(10, 900)
    norms[4, 801] *= 100
    write_monitor(tmp_path / "a", norms)
    assert main(["trend", str(tmp_path / "a"), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/trend.html").read_text()
    (kind,) = page_data(page)["kinds"]
    group = kind["group"]
    assert group == 3
    assert "3 of grad_reduced" in capsys.readouterr().out
    assert kind["starts"][:2] == [1, 1 + group]
    assert kind["ends"][-1] == 900
    (text,) = re.findall(rf'id="{kind["maps"][0]["id"]}">(.*?)</script>', page)
    most, least = decode(text, False, 10)
    assert most.shape == (10, 300)
    assert np.argmax(most[4]) == 801 // group
    assert (most >= least).all()


def test_two_runs_have_three_sides_and_the_difference_is_exact(tmp_path: Path) -> None:
    norms = noisy(3, 60)
    write_monitor(tmp_path / "a", norms)
    other = norms.copy()
    other[2, 50] *= 4
    write_monitor(tmp_path / "b", other, steps=range(1, 61))
    write_losses(tmp_path / "a", [1.0] * 60)
    assert main(["trend", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/trend.html").read_text()
    training, kind = page_data(page)["kinds"]
    assert training["names"] == ["loss"]
    sides = {(one["statistic"], one["side"]) for one in kind["maps"]}
    assert sides == {(name, side) for name in ("norm", "deviation") for side in (0, 1, 2)}
    (one,) = (one for one in kind["maps"] if (one["statistic"], one["side"]) == ("norm", 2))
    (text,) = re.findall(rf'id="{one["id"]}">(.*?)</script>', page)
    (codes,) = decode(text, True, 3)
    scale = one["scale"]
    values = scale["low"] + (codes - 1.0) / (TOP - 1) * (scale["high"] - scale["low"])
    expected = np.zeros((3, 60))
    expected[2, 50] = 2  # the binary logarithm of 4
    assert np.allclose(values, expected, atol=1e-4)

"""The tables of docs/planning.md and docs/sizes.md are what the product computes."""

import json
import math
import re
from pathlib import Path

import pytest

from gpt2.training_step import build_model
from referee.verdict.power import detectable
from referee.verdict.statistics import perplexity_percent
from runtime.gpu_specs import TARGETS
from runtime.settings import ModelConfig
from study.analysis.designs import Noise, cheapest_design, detectable_difference, only_look

DOCS = Path(__file__).parents[2] / "docs"
GIVEN = Noise.of_both(math.log1p(0.005))


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table with this first heading."""
    text = (DOCS / page).read_text().split(f"| {heading} |", 1)[1]
    lines = re.match(r".*\n\|[-|]+\n((?:\|.*\n)+)", text)
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]


def test_the_designs_of_the_planning_page() -> None:
    tokens = json.loads((DOCS / "results/2026-11-22-cpu-embedded/report.json").read_text())["floor"]["sigma"]
    published = json.loads((DOCS / "results/2026-11-26-cpu-bytes-5-seeds/report.json").read_text())
    sigma, (verdict,) = published["floor"]["sigma"], published["verdicts"]
    controls, spread = Noise.of_both(sigma), verdict["test"]["spread"]
    own = Noise.from_differences(spread, verdict["controls"][0], sigma, len(verdict["controls"]) - 1)
    found = rows("planning.md", "noise of one run")
    for noise, cells in zip((GIVEN, controls, Noise.of_both(tokens), own), found, strict=True):
        for (arms, seeds), cell in zip(((1, 7), (4, 3), (4, 5)), cells[1:4], strict=True):
            seen = perplexity_percent(detectable_difference(noise, arms, seeds))
            assert float(cell) == pytest.approx(seen, abs=0.00501)
        best = cheapest_design(noise, math.log(1.01), lambda k, s: (k + 1) * s)
        assert best
        assert cells[4] == f"({best.controls} + 1) x {best.seeds}"


def test_the_trends_of_the_sizes_page() -> None:
    for seeds, effect, change in rows("sizes.md", "seeds"):
        count = int(seeds)
        seen = detectable_difference(GIVEN, 1, count)
        trend = detectable(2 * (count - 1), only_look(count)) * GIVEN.spread(1) * math.sqrt(2 / count)
        assert float(effect) == pytest.approx(perplexity_percent(seen), abs=0.00501)
        assert float(change) == pytest.approx(perplexity_percent(trend), abs=0.00501)


def test_the_tokens_of_two_hours_in_kconfig_follow_from_the_flops_of_the_model() -> None:
    """A default too small for a card repeats tokens without a word."""
    sizes = ModelConfig("124M", 12, 12, 768, 1024, 0.0)
    flops = build_model(sizes).flops_per_token()
    text = " ".join((DOCS.parent / "gpt2" / "Kconfig").read_text().split())
    assert f"{flops / 1e9:.3f} GFLOP per token" in text
    for card, place in (("h200", "{} billion tokens on an H200"), ("mi300x", "{} on an MI300X")):
        tokens = 0.4 * (TARGETS[card].peak_flops or 0) * 7200 / flops / 1e9
        assert place.format(f"{tokens:.2f}") in text
    assert f"{100 * 1048576 / 52428800 / 3:.1f} % of the FLOPs" in text

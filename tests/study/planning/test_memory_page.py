"""The page of a memory prediction: every byte drawn once, the peak marked, and no name that is more than text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.allocation_tracker import KINDS, Allocation, Timeline
from gpt2.predicted_memory import Prediction
from referee.pages.html_page import render_html
from study.planning.memory_page import COLUMNS, MemoryRow, memory_document, timeline_figure

PHASES = ("forward", "backward", "optimizer", "evaluation")
MIB = 2**20


@st.composite
def timelines(draw) -> Timeline:
    """Blocks of any life in four phases of any length."""
    ends = sorted(draw(st.sets(st.integers(2, 3000), min_size=4, max_size=4)))
    spans = list(zip([0, *ends], ends, strict=False))
    phases = [(name, a + 1, b) for name, (a, b) in zip(PHASES, spans, strict=True)]
    blocks = [Allocation(draw(st.integers(1, 2**36)), 0, "", kind="parameters")]
    for _ in range(draw(st.integers(0, 25))):
        start = draw(st.integers(1, ends[-1]))
        end = draw(st.none() | st.integers(start, ends[-1]))
        phase = next(name for name, a, b in phases if a <= start <= b)
        kind = draw(st.sampled_from(["", *KINDS]))
        nbytes, survived = draw(st.integers(1, 2**36)), draw(st.booleans())
        blocks.append(Allocation(nbytes, start, phase, end, kind, survived))
    return Timeline(blocks, phases, ends[-1])


def peak_at_the_end() -> Timeline:
    """An activation and weights, and at the very last event more than before."""
    blocks = [
        Allocation(4 * MIB, 0, "", kind="parameters"),
        Allocation(3 * MIB, 10, "forward", 100),
        Allocation(40 * MIB, 99, "evaluation"),
    ]
    return Timeline(blocks, [("forward", 1, 50), ("evaluation", 51, 100)], 100)


def a_row(timeline: Timeline, name: str = "B", same_as: str = "") -> MemoryRow:
    for phase in PHASES:
        if phase not in {found for found, _, _ in timeline.phases}:
            timeline.phases.append((phase, timeline.events, timeline.events))
    return MemoryRow(name, 4, Prediction(timeline.peak_bytes(), timeline), 8, True, same_as)


def heights(figure: dict[str, Any]) -> list[float]:
    """The upper edge of the stack at each drawn event."""
    return [sum(values) for values in zip(*(trace["y"] for trace in figure["data"]), strict=True)]


@settings(max_examples=40, deadline=None)
@given(timelines())
def test_the_stacked_areas_sum_to_the_allocated_bytes_and_reach_the_peak(timeline: Timeline) -> None:
    figure = timeline_figure(timeline)
    unit = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[figure["layout"]["yaxis"]["title"]["text"]]
    events = figure["data"][0]["x"]
    assert len(events) <= COLUMNS
    top = timeline.peak_bytes() / unit
    for event, height in zip(events, heights(figure), strict=True):
        assert height == pytest.approx(timeline.curve()[event] / unit, rel=1e-3, abs=1e-4 * top)
    assert max(heights(figure)) == pytest.approx(top, rel=1e-3)
    assert figure["layout"]["yaxis"]["range"][1] > top


def test_a_hostile_name_is_text_on_the_page_and_in_the_figure() -> None:
    hostile = '"></script><script>alert(1)</script><img src=//x><b>x</b>'
    timeline = peak_at_the_end()
    timeline.phases.append((hostile, 100, 100))
    document = memory_document([a_row(timeline, hostile)], hostile, [hostile])
    page = render_html(document)
    plain = render_html(memory_document([a_row(peak_at_the_end())], "a card", ["a note"]))
    for tag in ("<script", "<img", "<b>"):
        assert page.count(tag) == plain.count(tag)
    assert "<b>x" not in str(timeline_figure(timeline))

"""The chart of a step: every byte drawn once, the peak found and named, and no name that is more than text."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.memory import chart
from gpt2.memory.allocation_tracker import KINDS, Block, Timeline
from gpt2.memory.chart import (
    BOTTOM,
    COLOURS,
    COLUMNS,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    columns,
    readable,
    svg,
)

SVG = "{http://www.w3.org/2000/svg}"
PHASES = ("forward", "backward", "optimizer", "evaluation")
MIB = 2**20


@st.composite
def timelines(draw) -> Timeline:
    """Blocks of any life in four phases of any length."""
    ends = sorted(draw(st.sets(st.integers(2, 3000), min_size=4, max_size=4)))
    spans = list(zip([0, *ends], ends, strict=False))
    phases = [(name, a + 1, b) for name, (a, b) in zip(PHASES, spans, strict=True)]
    blocks = [Block(draw(st.integers(1, 2**36)), 0, "", "token", kind="parameters")]
    for _ in range(draw(st.integers(0, 25))):
        born = draw(st.integers(1, ends[-1]))
        died = draw(st.none() | st.integers(born, ends[-1]))
        phase = next(name for name, a, b in phases if a <= born <= b)
        kind = draw(st.sampled_from(["", *KINDS]))
        blocks.append(
            Block(draw(st.integers(1, 2**36)), born, phase, "norm", died, kind, draw(st.booleans()))
        )
    return Timeline(blocks, phases, ends[-1])


def peak_at_the_end() -> Timeline:
    """An activation and weights, and at the very last event more than before."""
    blocks = [
        Block(4 * MIB, 0, "", "token", kind="parameters"),
        Block(3 * MIB, 10, "forward", "blocks.0.mlp.fc", 100, outlived=True),
        Block(40 * MIB, 99, "evaluation", "head and loss", None),
    ]
    return Timeline(blocks, [("forward", 1, 50), ("evaluation", 51, 100)], 100)


def drawn(timeline: Timeline, title: str = "a step") -> ElementTree.Element:
    return ElementTree.fromstring(svg(timeline, title))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def bands(picture: ElementTree.Element) -> dict[str, list[tuple[float, float, float]]]:
    """(x, upper edge, lower edge) in each column of each kind that is drawn."""
    found = {}
    for polygon in picture.iter(f"{SVG}polygon"):
        points = [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
        half = len(points) // 2
        pairs = zip(points[:half], reversed(points[half:]), strict=True)
        found[polygon[0].text or ""] = [(x, upper, lower) for (x, upper), (_, lower) in pairs]
    return found


@given(timelines())
@settings(max_examples=30, deadline=None)
def test_the_kinds_lie_one_on_another_and_add_up_to_all_that_is_alive(timeline: Timeline) -> None:
    picture = drawn(timeline)
    scale = (HEIGHT - TOP - BOTTOM) / (1.08 * timeline.peak_bytes())  # dots a byte
    floor, rounding = HEIGHT - BOTTOM, 0.11 * len(KINDS)
    found = bands(picture)
    for column, event in enumerate(columns(timeline, 1, timeline.events)):
        heights = [lower - upper for band in found.values() for _, upper, lower in band[column : column + 1]]
        assert min(heights) >= 0
        assert sum(heights) == pytest.approx(scale * timeline.curve()[event], abs=rounding)
        highest = min(band[column][1] for band in found.values())
        assert floor - highest == pytest.approx(sum(heights), abs=rounding)


@given(timelines())
@settings(max_examples=30, deadline=None)
def test_no_peak_is_lost_between_the_columns(timeline: Timeline) -> None:
    events = columns(timeline, 1, timeline.events)
    assert len(events) <= COLUMNS
    assert events == sorted(events)
    assert max(timeline.curve()[event] for event in events) == timeline.peak_bytes()


@given(timelines())
@settings(max_examples=30, deadline=None)
def test_the_annotation_says_how_much_when_and_of_which_module_and_lies_in_the_picture(
    timeline: Timeline,
) -> None:
    picture = drawn(timeline)
    peak = timeline.peak_event()
    module, kind, nbytes = timeline.by_module(peak)[0]
    assert f"peak {readable(timeline.peak_bytes())}, in {timeline.phase_at(peak)}" in texts(picture)
    assert f"{module}: {kind} {readable(nbytes)}" in texts(picture)
    (mark,) = picture.iter(f"{SVG}circle")
    assert LEFT <= float(mark.attrib["cx"]) <= WIDTH - RIGHT
    assert TOP <= float(mark.attrib["cy"]) <= HEIGHT - BOTTOM
    box = next(r for r in picture.iter(f"{SVG}rect") if "stroke" in r.attrib)
    assert float(box.attrib["x"]) >= LEFT
    assert float(box.attrib["x"]) + float(box.attrib["width"]) <= WIDTH
    highest = min(upper for band in bands(picture).values() for _, upper, _ in band)
    assert float(mark.attrib["cy"]) == pytest.approx(highest, abs=1)


def test_a_peak_at_the_right_edge_is_not_hidden_by_what_is_said_of_it() -> None:
    picture = drawn(peak_at_the_end())
    (mark,) = picture.iter(f"{SVG}circle")
    box = next(r for r in picture.iter(f"{SVG}rect") if "stroke" in r.attrib)
    assert float(box.attrib["x"]) + float(box.attrib["width"]) < float(mark.attrib["cx"])


def test_every_kind_has_a_colour_of_its_own_and_the_legend_says_which() -> None:
    picture = drawn(peak_at_the_end())
    assert set(COLOURS) == set(KINDS)
    assert len(set(COLOURS.values())) == len(KINDS)
    assert set(KINDS) <= set(texts(picture))
    colours = {polygon[0].text: polygon.attrib["fill"] for polygon in picture.iter(f"{SVG}polygon")}
    assert colours == {kind: COLOURS[kind] for kind in ("parameters", "activations", "temporaries")}


def test_phases_wide_enough_are_named_below_in_their_order() -> None:
    picture = drawn(peak_at_the_end())
    named = [text for text in texts(picture) if text in PHASES]
    assert named == ["forward", "evaluation"]


@pytest.mark.parametrize("hostile", ["</text><script>alert(1)</script>", "a & b", '"><image href="//x"/>'])
def test_a_hostile_name_stays_text(hostile: str) -> None:
    timeline = peak_at_the_end()
    timeline.blocks.append(Block(50 * MIB, 0, "", hostile, kind="parameters"))
    picture = drawn(timeline, hostile)
    assert hostile in texts(picture)
    assert any(text.startswith(f"{hostile}: parameters") for text in texts(picture))
    allowed = {"svg", "rect", "text", "line", "polygon", "title", "circle"}
    assert {element.tag.removeprefix(SVG) for element in picture.iter()} <= allowed


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.00 KiB"), (512, "0.50 KiB"), (3 * 2**20, "3.00 MiB"), (13.92 * 2**30, "13.92 GiB")],
)
def test_bytes_are_said_in_the_unit_that_suits_them(nbytes: float, text: str) -> None:
    assert readable(nbytes) == text


@pytest.mark.parametrize("top", [3000, 5 * MIB, 300 * MIB, 86 * 2**30, 2**43])
def test_the_axis_has_a_few_round_marks_up_to_the_top(top: int) -> None:
    lines = "".join(chart._grid(top, lambda nbytes: nbytes))
    marks = ElementTree.fromstring(f"<g>{lines}</g>").findall("text")
    assert 3 <= len(marks) <= 10
    assert (marks[0].text or "").startswith("0 ")

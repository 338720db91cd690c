"""A timeline of memory as SVG: what is alive by kind, event by event, the phases, and the peak with its causes."""

from __future__ import annotations

from html import escape

from gpt2.memory.allocation_tracker import KINDS, Timeline

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 1000, 420, 70, 40, 66, 20
COLUMNS = 900
COLOURS = {
    "parameters": "#4c6a92",
    "optimizer state": "#86a5c9",
    "gradients": "#c98b3f",
    "activations": "#5f9e6e",
    "temporaries": "#c0504d",
    "other": "#9a9a9a",
}
CAUSES = 6  # rows of the peak's annotation
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def readable(nbytes: float) -> str:
    """Bytes in the unit that suits them: 12.34 GiB."""
    size, unit = next((row for row in UNITS if nbytes >= row[0]), UNITS[-1])
    return f"{nbytes / size:.2f} {unit}"


def svg(timeline: Timeline, title: str) -> str:
    """One step and an evaluation batch; horizontally the allocations and frees in their order, not time."""
    first, last = timeline.phases[0][1], timeline.phases[-1][2]
    peak = timeline.peak_event()
    top = timeline.curve()[peak] * 1.08
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(event: int) -> float:
        return LEFT + wide * (event - first) / max(last - first, 1)

    def y(nbytes: float) -> float:
        return TOP + high * (1 - nbytes / top)

    events = columns(timeline, first, last)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    parts += _grid(top, y)
    parts += _areas(timeline, events, x, y)
    parts += _phases(timeline, x)
    parts += _annotation(timeline, peak, x(peak), y(timeline.curve()[peak]))
    parts += _legend()
    return "\n".join([*parts, "</svg>"])


def columns(timeline: Timeline, first: int, last: int) -> list[int]:
    """The event to draw in each column: the one with the most alive, so that no peak is lost."""
    step = max(1, -(-(last - first + 1) // COLUMNS))
    curve = timeline.curve()
    return [
        max(range(at, min(at + step, last + 1)), key=curve.__getitem__) for at in range(first, last + 1, step)
    ]


def _areas(timeline: Timeline, events: list[int], x, y) -> list[str]:  # type: ignore[no-untyped-def]
    below = [0] * len(events)
    series = timeline.by_kind_over_time()
    shapes = []
    for kind in KINDS:
        above = [base + series[kind][event] for base, event in zip(below, events, strict=True)]
        if above != below:
            upper = [f"{x(e):.1f},{y(n):.1f}" for e, n in zip(events, above, strict=True)]
            lower = [f"{x(e):.1f},{y(n):.1f}" for e, n in zip(events, below, strict=True)]
            points = " ".join([*upper, *reversed(lower)])
            shapes.append(
                f'<polygon points="{points}" fill="{COLOURS[kind]}"><title>{kind}</title></polygon>'
            )
        below = above
    return shapes


def _grid(top: float, y) -> list[str]:  # type: ignore[no-untyped-def]
    size, unit = next((row for row in UNITS if top >= 2 * row[0]), UNITS[-1])
    step = next(s for e in range(12) for s in (10**e, 2 * 10**e, 5 * 10**e) if top / size / s <= 8)
    lines = []
    for tick in range(0, int(top / size) + 1, step):
        at = y(tick * size)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick} {unit}</text>')
    return lines


def _phases(timeline: Timeline, x) -> list[str]:  # type: ignore[no-untyped-def]
    marks = []
    for name, first, last in timeline.phases:
        marks.append(
            f'<line x1="{x(first):.1f}" x2="{x(first):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM + 6}" stroke="#555" '
            'stroke-dasharray="3,3"/>'
        )
        if x(last) - x(first) > 45:
            middle = (x(first) + x(last)) / 2
            marks.append(
                f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{name}</text>'
            )
    return marks


def _annotation(timeline: Timeline, peak: int, at_x: float, at_y: float) -> list[str]:
    rows = [f"peak {readable(timeline.curve()[peak])}, in {timeline.phase_at(peak)}"]
    rows += [f"{module}: {kind} {readable(n)}" for module, kind, n in timeline.by_module(peak)[:CAUSES]]
    wide = round(6.3 * max(len(row) for row in rows)) + 12
    box_x = WIDTH - RIGHT - wide if at_x < WIDTH - RIGHT - wide - 14 else max(LEFT, at_x - 14 - wide)
    box_y = TOP
    drawn = [
        f'<line x1="{at_x:.1f}" y1="{at_y:.1f}" x2="{box_x:.1f}" y2="{box_y + 12}" stroke="black"/>',
        f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="none" stroke="black" stroke-width="2"/>',
        f'<rect x="{box_x:.1f}" y="{box_y:.1f}" width="{wide}" height="{16 * len(rows) + 8}" fill="white" '
        'fill-opacity="0.9" stroke="#555"/>',
    ]
    for index, row in enumerate(rows):
        weight = ' font-weight="bold"' if not index else ""
        drawn.append(
            f'<text x="{box_x + 6:.1f}" y="{box_y + 16 * (index + 1):.1f}"{weight}>{escape(row)}</text>'
        )
    return drawn


def _legend() -> list[str]:
    drawn, at = [], LEFT
    for kind in KINDS:
        drawn.append(f'<rect x="{at}" y="{HEIGHT - 32}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        drawn.append(f'<text x="{at + 17}" y="{HEIGHT - 22}">{kind}</text>')
        at += 40 + 7 * len(kind)
    drawn.append(
        f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="#555">left to right: allocations and frees in order</text>'
    )
    return drawn

"""The section of a report on learning rates: loss against rate, the choice, and edges of the grid. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from referee.pages.document import COPY, FILTER, SORT, Block, BulletList, Details, Figure, Note, Table
from referee.pages.figures import Plain, axis, figure, line, trace
from referee.pages.markup import Link, Strong, Text, escape_html
from study.analysis.tuned_verdicts import ArmRates, RateReport
from study.arm_colors import color, color_label
from study.rate_tuning import RateRun

NARROW = {"margin": {"l": 62, "r": 84}, "font": {"size": 11}, "height": 340}
ABOUT = (
    "Final validation loss of the tuning runs; lower is better. Lines: mean over the tuning seeds. Small points: each "
    "seed. Rings: the chosen rate. A run without a finite loss has no point."
)
ABOUT_TABLE = (
    "Mean final validation loss in nats over the tuning seeds, which are not judged. Bold: the chosen rate. The "
    "control arms are one function class and share one choice, from the mean over all of them."
)


def learning_rates_blocks(rates: RateReport, variants: Sequence[str]) -> list[Block]:
    """Return the figure, the table, the edges of the grid, and the runs."""
    names = list(dict.fromkeys([*variants, *(arm.arm for arm in rates.arms)]))
    columns: dict[str, Callable[[ArmRates], Text]] = {
        "arm": lambda arm: color_label(arm.arm, names),
        **{rate: _cell(rate) for rate in rates.rates},
        "chosen": lambda arm: arm.chosen or "not yet",
    }
    runs: dict[str, Callable[[RateRun], Text]] = {
        "run": lambda run: run.run if run.status == "missing" else Link(run.run, f"runs/{run.run}/run.json"),
        "status": lambda run: "pending" if run.status == "missing" else run.status,
        "loss": lambda run: "-" if run.loss is None else f"{run.loss:.4f}",
        "without a loss because": lambda run: run.why_not,
    }
    listed = Table.of([*rates.tuning, *rates.others], runs, (3,), tools=(SORT, FILTER))
    return [
        Figure("learning-rates", loss_against_rate(rates, names), ABOUT),
        Table.of(rates.arms, columns, tools=(SORT, COPY)),
        Note(ABOUT_TABLE),
        BulletList(edge_sentences(rates)),
        Details(f"{len(listed.rows)} runs at tuning seeds and at other rates", [listed]),
    ]


def _cell(rate: str) -> Callable[[ArmRates], Text]:
    def cell(arm: ArmRates) -> Text:
        loss = arm.means.get(rate)
        text = "-" if loss is None else f"{loss:.4f}"
        return Strong(text) if rate == arm.chosen else text

    return cell


def edge_sentences(rates: RateReport) -> list[str]:
    """Return a sentence for each arm whose rate is at the edge of the grid; the control arms share one."""
    groups: dict[str, list[ArmRates]] = {}
    for arm in rates.arms:
        if arm.next_rate:
            groups.setdefault("" if arm.control else arm.arm, []).append(arm)
    sentences = []
    for arms in groups.values():
        chosen, further = arms[0].chosen, arms[0].next_rate
        lowest = chosen == rates.rates[0]
        grid = [further, *rates.rates] if lowest else [*rates.rates, further]
        sentences.append(
            f"Warning: the best rate of {', '.join(arm.arm for arm in arms)}, {chosen}, is the "
            f"{'lowest' if lowest else 'highest'} of the grid, so a rate beyond it may be better; fix: extend the grid "
            f'to {further}: CONFIG_LEARNING_RATES="{" ".join(grid)}" under another CONFIG_STUDY_NAME.'
        )
    return sentences


def loss_against_rate(rates: RateReport, names: Sequence[str]) -> Plain | None:
    """Draw loss against rate on a logarithmic axis: the mean of each arm, its seeds, and a ring at its choice."""
    data: list[Plain] = []
    for arm in rates.arms:
        means = [(float(rate), loss) for rate, loss in arm.means.items() if loss is not None]
        ink, seeds = (
            color(arm.arm, names),
            [run for run in rates.tuning if run.arm == arm.arm and run.loss is not None],
        )
        if not seeds:
            continue
        hover = f"%{{y:.4f}} nats at %{{x}}<br>{escape_html(arm.arm)}"
        data.append(
            line(
                arm.arm, ink, arm.arm, label=arm.arm, marker={"size": 7},
                x=[rate for rate, _ in means], y=[loss for _, loss in means], hovertemplate=f"mean {hover}",
            )
        )  # fmt: skip
        data.append(
            trace(
                f"{arm.arm}, seeds", arm.arm, mode="markers", marker={"size": 4, "color": ink},
                x=[float(run.rate) for run in seeds], y=[run.loss for run in seeds],
                text=[f"seed {run.seed}" for run in seeds], hovertemplate=f"%{{text}}: {hover}",
            )
        )  # fmt: skip
        if arm.means.get(arm.chosen) is not None:
            ring = {"size": 16, "symbol": "circle-open", "color": ink, "line": {"color": ink, "width": 2}}
            data.append(
                trace(
                    f"{arm.arm}, chosen", arm.arm, mode="markers", marker=ring, x=[float(arm.chosen)],
                    y=[arm.means[arm.chosen]], hovertemplate=f"chosen: {hover}",
                )
            )  # fmt: skip
    if not data:
        return None
    ticks = {"tickvals": [float(rate) for rate in rates.rates], "ticktext": rates.rates}
    across = axis("learning rate", type="log", **ticks)
    upwards = axis("final validation loss (nats), tuning seeds", nticks=7)
    return figure(data, 400, (70, 110, 12, 48), NARROW, xaxis=across, yaxis=upwards)

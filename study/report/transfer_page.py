"""The page of `make transfer`: the three answers, and the matrix as a table. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpt2.platforms import parse_platform
from ra.arms import parse_arm
from referee.pages.document import (
    HTML,
    MARKDOWN,
    Block,
    BulletList,
    Document,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from referee.pages.markup import Strong, Text
from referee.verdict.rows import LOSS
from referee.verdict.statistics import Interval, mean
from runtime.run_record import LaterEvaluation
from study.evaluation.transfer_matrix import (
    ACCURACY,
    ENDS,
    GAP,
    TransferReport,
    TransferVerdict,
    computed_by,
    gap,
    item_gap,
    loss_of,
)
from study.report.method import p_text, seeds_text

METHOD = (
    "Each answer is a paired t test over seeds. The tests of one question share 5 % by Holm's method. Under three "
    "seeds there is no answer.",
    "Where the gap is equivalent to zero (two one-sided tests within the margin), noise has nothing to shrink and is "
    "not judged there.",
    "Without control arms the gap is that of all arms without noise. An arm with noise is compared with the control "
    "arms, or with its own arm without noise.",
)


def transfer_document(report: TransferReport) -> Document:
    """transfer.html, transfer.md and the terminal."""
    answers = [*report.verdicts.gaps, *report.verdicts.shrinks, *report.verdicts.costs]
    missing = [f"Not evaluated: {', '.join(report.missing[:5])}{' ...' if len(report.missing) > 5 else ''}."]
    blocks: list[Block] = [
        summary(report),
        BulletList([_sentence(one, report) for one in answers]),
        BulletList(_diverged(report)),
        BulletList(missing if report.missing else []),
        Section("Gap by arm and platform", [gap_table(report), Note(f"Mean over the seeds, {report.unit}.")]),
        Only((HTML, MARKDOWN), [Section("Platforms", [BulletList(_legend(report))])]),
        Only((HTML, MARKDOWN), [Section("Method", [BulletList([gap_text(report.metric), *METHOD])])]),
    ]
    seeds = len({row.seed for row in report.matrix})
    trained = f"trained on {report.home}, {report.device}"
    subtitle = f"{', '.join(report.studies)} · {trained} · {seeds_text(seeds)} · {len(report.arms)} arms"
    return Document("Transfer", blocks, subtitle=subtitle)


def gap_text(metric: str) -> str:
    """What a gap is."""
    items, better = ("windows", "lower") if metric == LOSS else ("test problems", "higher")
    return (
        f"Gap: {metric} on a platform minus {metric} on the platform of training, of the same weights on the same "
        f"{items}; {better} is better."
    )


def _sentence(one: TransferVerdict, report: TransferReport) -> Text:
    found = one.test.difference
    interval = "" if found.low is None else f" [{found.low:+.5f}, {found.high:+.5f}]"
    number = f"{found.mean:+.5f} {report.unit}{interval}, {seeds_text(one.seeds)}"
    if one.p_value is not None:
        number += f", {p_text(one.p_value)}"
    if not one.arm:
        tail = "; noise has nothing to shrink there" if one.word in ENDS else ""
        return (Strong(one.platform), f": {one.word} ({number}){tail}.")
    if one.platform == report.home:
        return (Strong(one.arm), f" on the platform of training, {report.home}: {one.word} ({number}).")
    return (Strong(one.arm), f" on {one.platform}: {one.word} (change of the gap {number}).")


def _diverged(report: TransferReport) -> list[Text]:
    return [
        (
            Strong(arm, bad=True),
            f": {_seeds(seeds)} diverged; in no mean{', not judged' if parse_arm(arm).noise else ''}.",
        )
        for arm, seeds in report.diverged.items()
    ]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def gap_table(report: TransferReport) -> Table:
    """Mean loss on the platform of training, and mean gap on every other."""
    others = [name for name in report.platforms if name != report.home]
    rows: list[list[Text]] = []
    for arm in report.arms:
        home = list(report.values(arm, report.home).values())
        cells: list[Text] = [arm, f"{mean(home):.5f}" if home else "-"]
        for name in others:
            gap = report.mean_gap(arm, name)
            cells.append("-" if gap is None else f"{gap:+.5f}")
        rows.append(cells)
    return Table(["arm", f"{report.metric} on {report.home}", *others], rows, sortable=True)


def _legend(report: TransferReport) -> list[str]:
    devices = report.devices
    return [
        f"{name}: {parse_platform(name).text}"
        + (f" ({devices[name]})" if "@" in name and name in devices else "")
        for name in report.platforms
    ]


def summary(report: TransferReport) -> Paragraph:
    """One sentence on whether there is a gap at all."""
    gaps = [one.platform for one in report.verdicts.gaps if one.word == GAP]
    none = [one.platform for one in report.verdicts.gaps if one.word in ENDS]
    parts = [f"a gap on {', '.join(gaps)}"] if gaps else []
    parts += [f"none that matters on {', '.join(none)}"] if none else []
    return Paragraph(f"Trained on {report.home}: {'; '.join(parts)}." if parts else "")


ABOUT = (
    "Difference to the home platform, on which the run was trained, in nats per token (lower is better), with its 95 % "
    "interval over validation windows. It holds for these weights and this text; another seed is another run."
)
ABOUT_PLATFORM_ITEMS = (
    "acc_norm: of HellaSwag. Its difference is paired by item, in points, with its 95 % interval over the items. "
    "Flips: items that are right on one of the platforms and wrong on the other."
)
ABOUT_ACCURACY = (
    "Difference of accuracy to the home platform, on which the run was trained, with its 95 % interval over the test "
    "problems, paired by problem. It holds for these weights; another seed is another run."
)
NO_HOME = (
    "There is no result of the home platform on the machine of training, so there is no difference. Evaluate the run "
    "there, then copy evaluations/ of one machine to the other."
)


def platforms_document(
    run: str, home: LaterEvaluation | None, records: Sequence[LaterEvaluation], notes: Sequence[str] = ()
) -> Document:
    """Return the page of one run. home: its result on the platform and machine of training."""
    shown = [
        *([home] if home else []),
        *(one for one in records if not home or one.platform != home.platform),
    ]
    metric, columns = loss_of(shown[0]).metric, dict[str, Callable[[LaterEvaluation], Text]]()
    columns["platform"] = lambda record: record.platform + (" (home)" if record is home else "")
    columns[metric] = lambda record: f"{loss_of(record).value:.5f}"
    if metric == LOSS:
        columns["perplexity"] = lambda record: f"{math.exp(min(loss_of(record).value, 700.0)):.3f}"
    columns[f"difference{' in nats' * (metric == LOSS)} [95 %]"] = lambda record: _interval(
        gap(home, record) if home and record is not home else None, 1, 5
    )
    explained: list[Block] = [Note(NO_HOME if not home else ABOUT if metric == LOSS else ABOUT_ACCURACY)]
    if any(record.row(ACCURACY) for record in shown):
        by_item = {one.platform: item_gap(home, one) if home and one is not home else None for one in shown}
        columns |= {
            "acc_norm": lambda record: f"{row.value:.4f}" if (row := record.row(ACCURACY)) else "-",
            "difference in points [95 %]": lambda record: _interval(
                items.difference if (items := by_item[record.platform]) else None, 100, 2
            ),
            "flips": lambda record: (
                f"{items.flips} of {items.difference.count}" if (items := by_item[record.platform]) else "-"
            ),
        }
        explained.append(Note(ABOUT_PLATFORM_ITEMS))
    devices = dict.fromkeys(computed_by(one) for one in shown)
    items = f"{loss_of(shown[0]).items} {'windows' if metric == LOSS else 'problems'}"
    subtitle = f"{run} on {' and '.join(devices)}, {items}"
    legend = [f"{record.platform}: {parse_platform(record.platform).text}" for record in shown]
    table = Table.of(shown, columns, sortable=True)
    blocks: list[Block] = [table, *explained, BulletList(legend), *map(Note, notes)]
    return Document("Platforms", blocks, subtitle=subtitle)


def _interval(found: Interval | None, scale: int, digits: int) -> str:
    """A difference with its interval; "-" without one."""
    if found is None:
        return "-"
    mean, *ends = (
        f"{scale * value:+.{digits}f}" for value in (found.mean, found.low, found.high) if value is not None
    )
    return f"{mean} [{', '.join(ends)}]" if ends else mean

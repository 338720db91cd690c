"""Show the evaluations of one run on several platforms. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpt2.platforms import parse_platform
from referee.pages.document import COPY, SORT, Block, BulletList, Document, Note, Table
from referee.pages.markup import Text
from study.transfer.records import PlatformRecord, gap, item_gap

ABOUT = (
    "Difference to the home platform, on which the run was trained, in nats per token (lower is better), with its 95 % "
    "interval over validation windows. It holds for these weights and this text; another seed is another run."
)
ABOUT_ITEMS = (
    "acc_norm: of HellaSwag. Its difference is paired by item, in points, with its standard error. Changed: items with "
    "another chosen ending than on the home platform."
)
NO_HOME = (
    "There is no record of the home platform on the machine of training, so there is no difference. Evaluate the run "
    "there, then copy the records of one machine to the other."
)


def platforms_document(
    home: PlatformRecord | None, records: Sequence[PlatformRecord], notes: Sequence[str] = ()
) -> Document:
    """Return the page of one run. home: its record on the platform and machine of training."""
    shown = [
        *([home] if home else []),
        *(one for one in records if not home or one.platform != home.platform),
    ]
    columns: dict[str, Callable[[PlatformRecord], Text]] = {
        "platform": lambda record: record.platform + (" (home)" if record is home else ""),
        "loss": lambda record: f"{record.loss:.5f}",
        "perplexity": lambda record: f"{math.exp(min(record.loss, 700.0)):.3f}",
        "difference in nats [95 %]": lambda record: _difference(home, record),
    }
    explained: list[Block] = [Note(ABOUT if home else NO_HOME)]
    if any(record.hellaswag for record in shown):
        columns |= {
            "acc_norm": lambda record: f"{record.hellaswag.acc_norm:.4f}" if record.hellaswag else "-",
            "difference in points": lambda record: _item_difference(home, record),
            "changed": lambda record: _changed(home, record),
        }
        explained.append(Note(ABOUT_ITEMS))
    devices = dict.fromkeys(f"{one.device}, torch {one.torch}" for one in shown)
    subtitle = f"{shown[0].run} on {' and '.join(devices)}, {len(shown[0].window_losses)} windows"
    legend = [f"{record.platform}: {parse_platform(record.platform).text}" for record in shown]
    table = Table.of(shown, columns, tools=(SORT, COPY))
    blocks: list[Block] = [table, *explained, BulletList(legend), *map(Note, notes)]
    return Document("Platforms", blocks, subtitle=subtitle)


def _difference(home: PlatformRecord | None, other: PlatformRecord) -> str:
    if home is None or other is home:
        return "-"
    found = gap(home, other)
    if found.low is None or found.high is None:
        return f"{found.mean:+.5f}"
    return f"{found.mean:+.5f} [{found.low:+.5f}, {found.high:+.5f}]"


def _item_difference(home: PlatformRecord | None, other: PlatformRecord) -> str:
    found = item_gap(home, other) if home and other is not home else None
    if found is None:
        return "-"
    error = "" if found.stderr is None else f" ± {100 * found.stderr:.2f}"
    return f"{100 * found.difference:+.2f}{error}"


def _changed(home: PlatformRecord | None, other: PlatformRecord) -> str:
    found = item_gap(home, other) if home and other is not home else None
    return f"{found.changed} of {found.items}" if found else "-"

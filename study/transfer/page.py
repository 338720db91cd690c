"""Show the evaluations of one run on several platforms. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aqn.platforms import parse_platform
from pages.document import Block, BulletList, Document, Note, Table
from pages.markup import Text
from study.transfer.records import PlatformRecord, gap

ABOUT = (
    "Difference to the home platform, on which the run was trained, in nats per token, with its 95 % interval over "
    "validation windows. It holds for these weights and this text; another seed is another run."
)


def platforms_document(records: Sequence[PlatformRecord]) -> Document:
    """Return the page of one run; the first record is that of its home platform."""
    home = records[0]
    columns: dict[str, Callable[[PlatformRecord], Text]] = {
        "platform": lambda record: record.platform + (" (home)" if record is home else ""),
        "loss": lambda record: f"{record.loss:.5f}",
        "perplexity": lambda record: f"{math.exp(min(record.loss, 700.0)):.3f}",
        "difference in nats [95 %]": lambda record: "-" if record is home else _difference(home, record),
    }
    subtitle = f"{home.run} on {home.device}, torch {home.torch}, {len(home.window_losses)} windows"
    legend = [f"{record.platform}: {parse_platform(record.platform).text}" for record in records]
    blocks: list[Block] = [Table.of(records, columns), Note(ABOUT), BulletList(legend)]
    return Document("Platforms", blocks, subtitle=subtitle)


def _difference(home: PlatformRecord, other: PlatformRecord) -> str:
    found = gap(home, other)
    if found.low is None or found.high is None:
        return f"{found.mean:+.5f}"
    return f"{found.mean:+.5f} [{found.low:+.5f}, {found.high:+.5f}]"

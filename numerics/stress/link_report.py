"""The part of a stress report on links: odd ranks and links with their first deviation, and counts by exchange."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from numerics.repeat.corruption import Corruption
from numerics.stress.links import LinkFault, Links
from pages.document import Block, BulletList, Table
from pages.markup import Text

MOST_FAULTS = 200  # in the file


def link_sentences(links: Links) -> list[str]:
    """Return what deviates, one sentence each; none where every exchange had its known result."""
    ranks, pairs = links.odd()
    found = [
        f"{links.names[rank]}: exchanges with {_partners(links, rank)} of {len(links.names) - 1} other ranks deviate"
        + (", and its computations" if rank in links.faulty else "")
        for rank in ranks
    ]
    for pair in pairs:
        one, other = (links.names[rank] for rank in pair)
        directions = [f"{links.names[a]} to {links.names[b]}" for a, b in links.directions(pair)]
        way = f", {' and '.join(directions)}" if directions else ""
        what, why = f"link of {one} and {other}", ""
        if not links.separated(pair):
            what = f"{what}, or one of the two"
            why = "; their other pairs exchanged too little to separate them"
            why = why if len(links.names) > 2 else "; there is no other pair to separate them"
        found.append(f"{what}: its exchanges deviate{way}{why}")
    if links.faults and not found:
        sources = [links.names[rank] for rank in links.sources()]
        of = f"; the values came from {', '.join(sources)}" if sources else ""
        found.append(f"no exchange of two ranks deviates, exchanges of more do{of}")
    return found


def _partners(links: Links, rank: int) -> int:
    return len({fault.pair for fault in links.faults if fault.pair and rank in fault.pair})


def link_blocks(links: Links) -> list[Block]:
    lines = link_sentences(links)
    if links.faults:
        total = sum(count for count in links.counts.values())
        first = links.faults[0]
        members = ", ".join(links.names[rank] for rank in first.exchange.ranks)
        what = f"{first.exchange.title} of {members}, at {links.names[first.receiver]}, repetition {first.repetition}"
        shape = f": {first.shape}" if first.shape else ""
        lines.append(f"first deviation: {what}, after {first.seconds:.1f} s{shape}")
        lines.append(f"{len(links.faults):,} deviating results in {total:,} exchanges")
        lines += pattern_lines([fault.shape for fault in links.faults])
    if links.error:
        lines.append(f"the exchanges ended early: {links.error}")
    rows: dict[tuple[str, str], list[int]] = {}
    for exchange, count in links.counts.items():
        members = "each pair" if len(exchange.ranks) == 2 < len(links.names) else "all"
        row = rows.setdefault((exchange.kind, members), [0, 0])
        row[0] += count
        row[1] += sum(fault.exchange == exchange for fault in links.faults)
    headings: list[Text] = ["Exchange", "Ranks", "Repetitions", "Deviations"]
    table: list[list[Text]] = [[*key, f"{count:,}", f"{wrong:,}"] for key, (count, wrong) in rows.items()]
    return [BulletList(lines), Table(headings, table)]


def pattern_lines(shapes: Sequence[Corruption | None]) -> list[str]:
    """Return the patterns and the flipped bits of deviations, the most frequent first."""
    found = [shape for shape in shapes if shape is not None and shape.count]
    if not found:
        return []
    kinds = Counter(f"{shape.place}, {shape.change}" for shape in found)
    lines = ["patterns: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())]
    bits = Counter(bit for shape in found if len(shape.bits) == 1 for bit in shape.bits)
    if bits:
        lines.append("flipped bits: " + ", ".join(f"bit {bit} {count}" for bit, count in bits.most_common(4)))
    return lines


def links_json(links: Links) -> dict[str, Any]:
    """Return plain data."""
    ranks, pairs = links.odd()
    return {
        "ranks": links.names,
        "odd_ranks": [links.names[rank] for rank in ranks],
        "odd_links": [
            {
                "ranks": [links.names[rank] for rank in pair],
                "directions": [[links.names[rank] for rank in way] for way in links.directions(pair)],
            }
            for pair in pairs
        ],
        "conclusion": link_sentences(links),
        "exchanges": [
            {"exchange": exchange.title, "ranks": list(exchange.ranks), "repetitions": count}
            for exchange, count in links.counts.items()
        ],
        "faults": [_fault(fault) for fault in links.faults[:MOST_FAULTS]],
        "error": links.error or None,
    }


def _fault(fault: LinkFault) -> dict[str, Any]:
    plain = dataclasses.asdict(fault) | {"seconds": round(fault.seconds, 3), "exchange": fault.exchange.title}
    return plain | {"ranks": list(fault.exchange.ranks)}

"""The document and the files of a stress: faulty devices, their first deviation, counts; golden digests to compare."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numerics.dump_files import read_json, write_json, writing
from numerics.errors import NumericsError
from numerics.stress.link_report import link_blocks, link_sentences, links_json, pattern_lines
from numerics.stress.run import ALONE, TOGETHER, DeviatingResult, StressOutcome
from numerics.stress.vote import elect
from pages.document import Block, BulletList, Document, Paragraph, Section, Table
from pages.markup import Strong, Text

SCHEMA = 1
MOST_FAULTS = 200  # of a device in the file


def stress_document(outcome: StressOutcome) -> Document:
    faulty = outcome.faulty
    devices = len(outcome.kinds)
    total = sum(outcome.counts.values())
    if faulty:
        head: Text = (
            Strong(f"{len(faulty)} of {devices} devices deviate: {', '.join(faulty)}", bad=True),
            ".",
        )
    elif outcome.unresolved:
        head = ("No device is named: kernels without a majority of equal results.",)
    else:
        head = (f"No deviation on {devices} {'devices' if devices > 1 else 'device'} in {total:,} results.",)
    ended = " (stopped before the end)" if outcome.stopped else ""
    blocks: list[Block] = [Paragraph(head)]
    if outcome.links and outcome.links.odd()[1]:
        count = len(outcome.links.odd()[1])
        text = f"{count} {'links deviate' if count > 1 else 'link deviates'}; see Links."
        blocks.append(Paragraph((Strong(text, bad=True),)))
    elif outcome.links and outcome.links.faults and not faulty:
        blocks.append(
            Paragraph((Strong(f"Exchanges deviate: {link_sentences(outcome.links)[-1]}.", bad=True),))
        )
    for name in faulty:
        blocks.append(Section(f"{name}", _device(outcome, name)))
    blocks.append(Section("No majority", [BulletList([_unresolved(text) for text in outcome.unresolved])]))
    rows: list[list[Text]] = [
        [
            name,
            f"{outcome.repetitions(name):,}",
            f"{_count(outcome, name, ALONE):,}",
            f"{_count(outcome, name, TOGETHER):,}",
            str(len(outcome.faults[name])),
        ]
        for name in outcome.kinds
    ]
    headings: list[Text] = ["Device", "Results", "alone", "together", "Deviations"]
    blocks.append(Section("Devices", [Table(headings, rows)]))
    if outcome.links:
        blocks.append(Section("Links", link_blocks(outcome.links)))
    if outcome.spent:
        times: list[list[Text]] = [[kind, f"{seconds:.1f} s"] for kind, seconds in outcome.spent.items()]
        blocks.append(Section("Time", [Table(["Work", "Time"], times)]))
    kinds = dict.fromkeys(outcome.kinds.values())
    blocks.append(Section("Notes", [BulletList(outcome.notes)]))
    subtitle = f"{outcome.seconds:.0f} s of {outcome.planned_seconds:.0f} s{ended}; {'; '.join(kinds)}"
    return Document("Hardware stress", blocks, subtitle)


def _unresolved(text: str) -> str:
    return (
        f"{text}: no result in more than half of the votes. With one device the operation may not be deterministic; "
        "with two, compare with a third"
    )


def _count(outcome: StressOutcome, device: str, mode: str) -> int:
    return sum(count for (name, _, of), count in outcome.counts.items() if (name, of) == (device, mode))


def _device(outcome: StressOutcome, name: str) -> list[Block]:
    faults = outcome.faults[name]
    odd = [kernel for kernel, device in outcome.odd if device == name]
    lines: list[str] = []
    if name in outcome.lost:
        lines.append(f"no answer: {outcome.lost[name]}")
    if odd:
        lines.append(f"another result than the other devices in most repetitions: {', '.join(odd)}")
    if faults:
        lines.append(f"first deviation: {faults[0]}")
        lines.append(f"{len(faults)} of {outcome.repetitions(name):,} results deviate")
        by_kernel = Counter(fault.kernel for fault in faults)
        lines.append(
            "by kernel: " + ", ".join(f"{kernel} {count}" for kernel, count in by_kernel.most_common())
        )
        modes = Counter(fault.mode for fault in faults)
        lines.append("by mode: " + ", ".join(f"{mode} {count}" for mode, count in modes.most_common()))
        lines += pattern_lines([fault.shape for fault in faults])
    return [BulletList(lines)]


def write_stress(outcome: StressOutcome, folder: Path, label: str) -> list[Path]:
    """Write stress-LABEL.json. Returns its path."""
    path = folder / f"stress-{label}.json"
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, as_json(outcome, label))
    return [path]


def as_json(outcome: StressOutcome, label: str) -> dict[str, Any]:
    """Return plain data. golden: kind -> kernel -> digest as 16 hexadecimal digits."""
    return {
        "schema": SCHEMA,
        "machine": label,
        "devices": dict(outcome.kinds),
        "faulty": outcome.faulty,
        "seconds": round(outcome.seconds, 3),
        "planned_seconds": outcome.planned_seconds,
        "stopped": outcome.stopped,
        "results": [
            {"device": device, "kernel": kernel, "mode": mode, "repetitions": count}
            for (device, kernel, mode), count in outcome.counts.items()
        ],
        "faults": [_fault(fault) for faults in outcome.faults.values() for fault in faults[:MOST_FAULTS]],
        "odd": [{"kernel": kernel, "device": device} for kernel, device in outcome.odd],
        "unresolved": outcome.unresolved,
        "lost": outcome.lost,
        "links": links_json(outcome.links) if outcome.links else None,
        "seconds_by_kind": {kind: round(seconds, 3) for kind, seconds in outcome.spent.items()},
        "golden": {
            kind: {kernel: f"{value & (2**64 - 1):016x}" for kernel, value in golden.items()}
            for kind, golden in outcome.golden.items()
        },
    }


def _fault(fault: DeviatingResult) -> dict[str, Any]:
    return dataclasses.asdict(fault) | {"seconds": round(fault.seconds, 3)}


def compare_machines(folder: Path) -> tuple[list[str], list[str]]:
    """Compare the golden digests of every stress-*.json in a folder, by kind of device.

    Returns sentences, and the machines that are odd: another digest than more than half of the machines.
    """
    files = sorted(folder.glob("stress-*.json"))
    tables = [_read(path) for path in files]
    kinds = dict.fromkeys(kind for table in tables for kind in table["golden"])
    sentences: list[str] = []
    odd: dict[str, None] = {}
    for kind in kinds:
        golden = {table["machine"]: table["golden"][kind] for table in tables if kind in table["golden"]}
        if len(golden) < 2:
            continue
        for kernel in dict.fromkeys(kernel for digests in golden.values() for kernel in digests):
            votes = {
                name: [int(digests[kernel], 16)] for name, digests in golden.items() if kernel in digests
            }
            election = elect(votes)
            if election.golden is None:
                sentences.append(f"{kernel}: {', '.join(votes)} disagree, without a majority; {kind}")
            elif election.odd:
                odd |= dict.fromkeys(election.odd)
                sentences.append(
                    f"{kernel}: {', '.join(election.odd)} differ from the majority of {len(votes)}; {kind}"
                )
        if not sentences:
            sentences.append(f"{len(golden)} machines agree in every kernel: {', '.join(golden)}; {kind}")
    return sentences, list(odd)


def _read(path: Path) -> Mapping[str, Any]:
    content = read_json(path, "remove it, or run the stress there again")
    golden = content.get("golden") if isinstance(content, dict) else None
    try:
        assert isinstance(golden, dict)
        for digests in golden.values():
            for value in digests.values():
                int(value, 16)
        return {"machine": str(content["machine"]), "golden": golden}
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise NumericsError(
            f"{path} has no golden digests: {json.dumps(str(error))}; fix: remove it, or run the stress there again"
        ) from error

"""The held-out texts of one or several studies as a section of a page. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from referee.pages.document import Block, Note, Section, Table
from referee.pages.markup import Text, counted, number_with_detail
from referee.verdict.statistics import percent, perplexity, with_interval
from study.analysis.eval_set_results import EvalSetRow, EvalSets, EvalSetTable
from study.arm_colors import color_label
from study.runs import variant_order

Shown = Callable[[EvalSetTable, EvalSetRow], str]
NO_VERDICT = "The validation loss decides: no verdict uses this section."
ABOUT = (
    "Nats of all tokens per word (parts between white space), per token and per byte: mean over seeds [95 % interval]. "
    "Disjoint windows; the last of a document keeps its left context (lm-evaluation-harness, loglikelihood_rolling). "
    "Lower is better. The difference is of the perplexity per token, paired by seed, to the mean of the control arms."
)


def held_out_section(found: EvalSets, names: Sequence[str]) -> Section:
    """Return the section of a report. names: the variants of the report, for their colours."""
    blocks: list[Block] = []
    for table in found.tables:
        columns: dict[str, Callable[[EvalSetRow], Text]] = {
            "variant": lambda row: color_label(row.variant, names),
            "runs": lambda row: str(row.runs) if row.runs == row.of else f"{row.runs} of {row.of}",
            **{head: functools.partial(_cell, shown, table) for head, shown in SHOWN.items()},
            "against control arms": lambda row: number_with_detail(_difference(row)),
        }
        blocks.append(
            Section(
                table.name, [Table.of(table.rows, columns), Note(size_text(table)), _left_out(table)], level=3
            )
        )
    if not blocks:
        return Section("", [])
    return Section("Held-out texts", [Note(f"{NO_VERDICT} {ABOUT}"), *blocks])


def compared_section(studies: Mapping[str, EvalSets], units: str) -> Section:
    """Return the section of a comparison: a table for each text that a study has. units: the studies' tokens."""
    names = dict.fromkeys(table.name for found in studies.values() for table in found.tables)
    blocks: list[Block] = []
    for name in names:
        tables = {
            label: table for label, found in studies.items() for table in found.tables if table.name == name
        }
        rows = {label: {row.variant: row for row in table.rows} for label, table in tables.items()}
        variants = sorted({variant for one in rows.values() for variant in one}, key=variant_order)
        lines: list[list[Text]] = [
            [
                variant,
                *(
                    _cell(shown, tables[label], rows[label][variant])
                    if variant in rows.get(label, {})
                    else "-"
                    for shown in SHOWN.values()
                    for label in studies
                ),
            ]
            for variant in variants
        ]
        heads = [f"{head}, {label}" for head in SHOWN for label in studies]
        blocks.append(Section(name, [Table(["variant", *heads], lines), Note(_same_text(tables))], level=3))
    about = Note(f"{NO_VERDICT} Mean over seeds [95 % interval]. A token is {units}.")
    return Section("Held-out texts", [about, *blocks] if blocks else [])


def _cell(shown: Shown, table: EvalSetTable, row: EvalSetRow) -> Text:
    return number_with_detail(shown(table, row))


def _same_text(tables: Mapping[str, EvalSetTable]) -> str:
    """Say whether the studies have one text, and the size of each."""
    texts = {table.text_sha256 for table in tables.values()}
    sizes = " ".join(f"{label}: {size_text(table)}" for label, table in tables.items())
    if len(texts) > 1:
        return f"The studies have different texts of this name: do not compare them. {sizes}"
    tokens = {table.tokens_sha256 for table in tables.values()}
    other = (
        " The tokens differ: compare the perplexity per word and the bits per byte only."
        if len(tokens) > 1
        else ""
    )
    return f"One text.{other} {sizes}"


SHOWN: dict[str, Shown] = {
    "word perplexity": lambda table, row: with_interval(
        row.loss, lambda loss: perplexity(table.by_word(loss))
    ),
    "perplexity per token": lambda table, row: with_interval(row.loss, perplexity),
    "bits per byte": lambda table, row: with_interval(
        row.loss, lambda loss: f"{table.bits_per_byte(loss):.3f}"
    ),
}


def size_text(table: EvalSetTable) -> str:
    """The size of a text and the digest by which it is recognised."""
    return (
        f"{counted(table.documents, 'document')}, {counted(table.words, 'word')}, {table.bytes:,} bytes, "
        f"{table.tokens:,} tokens; "
        f"SHA-256 {table.text_sha256[:12]}."
    )


def _left_out(table: EvalSetTable) -> Note:
    names = ", ".join(table.left_out)
    return Note(
        names
        and f"Left out, evaluated on another text of this name: {names}; fix: restore the text, delete the folders of "
        "these runs, then run `make`."
    )


def _difference(row: EvalSetRow) -> str:
    return "control arm" if row.control else with_interval(row.against_controls, percent)

"""The sections of a report: results, curves, tasks of four endings, cost, learned probabilities and attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from referee.pages.document import (
    MARKDOWN,
    Block,
    BulletList,
    Figure,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from referee.pages.markup import Link, Strong, Text, counted, number_with_detail
from referee.verdict.statistics import percent, perplexity, with_interval
from study.analysis.eval_set_results import EvalSetRow, EvalSetTable
from study.arm_colors import color_label
from study.curves import probabilities, scalars, thinned, validation_curves
from study.hellaswag_scores import TASKS, EndingsScore, EndingsTask
from study.report import report_figures
from study.report.method import (
    difference,
    hours_text,
    item_result,
    score,
    seeds_text,
    shown,
    shown_bits,
)
from study.report.report_data import ArmRow, Report, bits, ended_runs
from study.runs import BASELINE, variant_order
from study.tuned_rates import FOLDER, Choice, Tuned, edge

ABOUT_RESULTS = (
    "after the last update, mean over seeds [95 % interval]. The difference is to the mean of the control arms of the "
    "same seed, in percent of perplexity; lower is better."
)
ABOUT_LOOKS = "The interval of a verdict is wider than these: it holds at all looks at the study together."
ABOUT_VERDICT = f"The first screen gives the verdicts. {ABOUT_LOOKS}"
OTHER_SEEDS = "Warning: the variants have different seeds. Compare the paired differences, not the means."
ABOUT_TIMES = (
    "Times of the runs include the effect of other load on the machine. Compare variants by the step-time ratio on the "
    "first screen: it was measured before the first run, in interleaved steps, with a 95 % interval."
)
ABOUT_DIFFERENCES = (
    "Differences to the mean of the control arms of the same seed, with 95 % intervals (t over seeds). Grey: the "
    "margin of equivalence. A variant is equivalent if its 90 % interval lies within it."
)
BAND = (
    "Lines: mean over seeds. Shaded: from the lowest seed to the highest. Seeds move all variants together; the "
    "differences below do not contain that."
)
ABOUT_OVER_TRAINING = (
    "Difference to the mean of the control arms, where every run was evaluated. Grey: a variant without effect that "
    "varies like the control arms lies there in 95 % of studies, at each point."
)
ABOUT_COST = (
    "Means over the runs that ended their schedule, or over the runs that were cut short where a variant has no other. "
    "Memory is the highest peak that one of them allocated. Cut short: the learning rate did not finish its decay."
)
ABOUT_ITEMS = (
    "McNemar's exact test, adjusted by Holm; with several seeds, the exact sign test of each item's net score. It "
    "compares these trained runs on these items and contains no seed noise."
)


Columns = dict[str, Callable[[ArmRow], Text]]


def seeds_cell(row: ArmRow) -> str:
    """The number of seeds with a final loss, and the number of all seeds where it is larger."""
    ended = row.final_loss.count if row.final_loss else 0
    return str(ended) if ended == len(row.seeds) else f"{ended} of {len(row.seeds)}"


def results_table(report: Report) -> Table:
    """The main table, a row for each variant."""
    columns: Columns = {
        "variant": lambda row: color_label(row.variant, report.variants),
        "seeds": seeds_cell,
        "final perplexity": lambda row: number_with_detail(shown(row.final_loss, len(row.seeds))),
        "bits per byte": lambda row: number_with_detail(shown_bits(bits(report, row.final_loss))),
        "best perplexity": lambda row: number_with_detail(shown(row.best_loss, len(row.seeds))),
        f"final against {report.reference}": lambda row: number_with_detail(
            difference(row.against_controls, len(row.seeds))
        ),
        **{task.heading: partial(score, task=task, measure=task.measures[-1]) for task in TASKS},
    }
    return Table.of(report.rows, columns, sortable=True)


def results_section(report: Report) -> Section:
    about = f"Perplexity per {report.unit} {ABOUT_RESULTS} {ABOUT_VERDICT if report.verdicts else ''}"
    several = len({(*row.seeds, seeds_cell(row)) for row in report.rows}) > 1
    notes = [Note(about), Note(OTHER_SEEDS if several else "")]
    return Section("Results", [results_table(report), *notes])


def training_section(report: Report) -> Section:
    """Curves over training."""
    several = len({run.seed for run in report.used}) > 1
    places = thinned(sorted(set.intersection(*(set(run.values) for run in report.used))), 100)
    differences = report_figures.over_training(report, places)
    curves = report_figures.loss_curves(validation_curves(ended_runs(report)))
    parts: dict[str, list[Block]] = {
        "Validation": [Figure("validation", curves, BAND if several else "")],
        "Differences": [Figure("over-training", differences, ABOUT_OVER_TRAINING)] if differences else [],
    }
    return Section("Over training", [Section(heading, blocks, level=3) for heading, blocks in parts.items()])


def endings_section(report: Report, task: EndingsTask) -> Section:
    """Accuracies with chance, and the paired test of the items where the runs have kept them."""
    title = task.name[:1].upper() + task.name[1:]
    scores: dict[str, EndingsScore] = {row.variant: getattr(row, task.key) for row in report.rows}
    if all(one.acc is None for one in scores.values()):
        reasons = dict.fromkeys(one.absent for one in scores.values() if one.absent)
        return Section(title, [Paragraph(f"Not run: {reason.rstrip('. ')}.") for reason in reasons])
    columns: Columns = {
        "variant": lambda row: color_label(row.variant, report.variants),
        **{measure: partial(score, task=task, measure=measure) for measure in task.measures},
        "items": lambda row: f"{scores[row.variant].items:,}" if scores[row.variant].items else "-",
        "runs": lambda row: f"{scores[row.variant].runs} of {len(row.seeds)}",
    }
    absent = [
        Note(f"{name} not run: {one.absent.rstrip('. ') or 'not asked for'}.")
        for name, one in scores.items()
        if one.acc is None
    ]
    return Section(title, [
        Note(task.about),
        Table.of(report.rows, columns, sortable=True),
        Note("± one standard error of the items, which more seeds do not shrink: same items. Chance is 25 %."),
        near_chance_note(report, task),
        *absent,
        _items(report, task),
    ])  # fmt: skip


def near_chance_note(report: Report, task: EndingsTask) -> Note:
    near = ", ".join(row.variant for row in report.rows if getattr(row, task.key).near_chance)
    return Note(near and f"† Within two standard errors of chance, so no sign of skill: {near}.")


def _items(report: Report, task: EndingsTask) -> Section:
    tests = [test for test in report.items if test.task == task.key]
    results = {(test.variant, test.measure): item_result(test) for test in tests}
    rows: list[list[Text]] = [
        [color_label(name, report.variants), *(results.get((name, key), "-") for key in task.measures)]
        for name in dict.fromkeys(variant for variant, _ in results)
    ]
    table = Table(["variant", *(f"{measure}: items won / lost" for measure in task.measures)], rows)
    return Section(
        f"Item by item against {BASELINE}",
        [table, Note(ABOUT_ITEMS)] if rows else [],
        level=3,
    )


def tokens_per_second(row: ArmRow) -> str:
    return f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-"


def gibibytes(row: ArmRow) -> str:
    """The highest peak of the variant's runs."""
    return "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f}"


def cost_section(report: Report) -> Section:
    columns: Columns = {
        "variant": lambda row: color_label(row.variant, report.variants),
        "updates": lambda row: f"{row.iterations:,.0f}",
        "tokens": lambda row: f"{row.tokens:,.0f}",
        "training": lambda row: (
            f"{row.train_seconds:,.1f} s" if row.train_seconds < 90 else hours_text(row.train_seconds / 3600)
        ),
        "parameters": lambda row: f"{row.parameters:,}" if row.parameters else "-",
        "tokens/s": tokens_per_second,
        "MFU": lambda row: f"{100 * row.mfu:.1f} %" if row.mfu is not None else "-",
        "peak GiB": gibibytes,
        "cut short": lambda row: f"{row.cut} of {len(row.seeds)}" if row.cut else "-",
    }
    times = Note(ABOUT_TIMES if report.speeds else "")
    table = Table.of(report.rows, columns, sortable=True)
    return Section("Speed and memory", [table, Note(ABOUT_COST), times])


def alternation_section(report: Report) -> Section:
    """The learned probabilities of the reciprocal path, and the other learned scalars."""
    blocks: list[Block] = []
    for number, found in enumerate(probabilities(report.used)):
        seeds = seeds_text(found.seeds)
        caption = f"{found.variant}: mean over {seeds}. From blue, the first layer, to orange, the last."
        blocks.append(Figure(f"alternation{number}", report_figures.alternation(found), caption))
    tables: list[Block] = []
    for name, moments in report.learned.items():
        layers = [str(layer) for layer in range(len(moments["last"]))]
        rows = [[moment, *(f"{p:.3f}" for p in moments[moment])] for moment in ("first", "last")]
        tables.append(Table([name, *layers], rows))
    about = (
        "Probability of the reciprocal path by layer, mean over seeds, at the first and the last evaluation."
    )
    blocks.append(Only((MARKDOWN,), [Paragraph(about), *tables] if tables else []))
    others = scalars(report.used)
    if others:
        rows = [[found.variant, found.name, _layers(found.first), _layers(found.last)] for found in others]
        blocks.append(
            Paragraph("Other learned scalars, one value for each layer that has it, mean over seeds.")
        )
        blocks.append(Table(["variant", "scalar", "first evaluation", "last evaluation"], rows))
    return Section("What was learned", blocks)


def _layers(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


# The held-out texts of one or several studies as a section of a page. Needs no torch.


Shown = Callable[[EvalSetTable, EvalSetRow], str]
NO_VERDICT = "The validation loss decides: no verdict uses this section."
ABOUT = (
    "Nats of all tokens per word (parts between white space), per token and per byte: mean over seeds [95 % interval]. "
    "Disjoint windows; the last of a document keeps its left context (lm-evaluation-harness, loglikelihood_rolling). "
    "Lower is better. The difference is of the perplexity per token, paired by seed, to the mean of the control arms."
)


def held_out_section(found: Sequence[EvalSetTable], names: Sequence[str]) -> Section:
    """Return the section of a report. names: the variants of the report, for their colours."""
    blocks: list[Block] = []
    for table in found:
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


def compared_section(studies: Mapping[str, Sequence[EvalSetTable]], units: str) -> Section:
    """Return the section of a comparison: a table for each text that a study has. units: the studies' tokens."""
    names = dict.fromkeys(table.name for found in studies.values() for table in found)
    blocks: list[Block] = []
    for name in names:
        tables = {label: table for label, found in studies.items() for table in found if table.name == name}
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
    texts = {table.digest for table in tables.values()}
    sizes = " ".join(f"{label}: {size_text(table)}" for label, table in tables.items())
    if len(texts) > 1:
        return f"The studies have different texts of this name: do not compare them. {sizes}"
    tokens = {table.tokens for table in tables.values()}
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
        f"{table.tokens:,} tokens; SHA-256 {table.digest}."
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


ABOUT_CHOICE = (
    "Mean final validation loss in nats over the tuning seeds, which are not judged. Bold: the chosen rate. The "
    "control arms are one function class and share one choice, from the mean over all of them. Runs: "
)


def choice_blocks(choice: Choice) -> list[Block]:
    """Return the table of the tuned learning rates, and the edges of the grid."""
    columns: dict[str, Callable[[tuple[str, Tuned]], Text]] = {
        "arm": lambda row: row[0],
        **{rate: partial(_rate_cell, rate) for rate in choice.rates},
        "chosen": lambda row: row[1].rate,
    }
    page = f"{FOLDER}/report.html"
    table = Table.of([*choice.arms.items()], columns, sortable=True)
    return [table, Note((ABOUT_CHOICE, Link(page, page))), BulletList(edge_sentences(choice))]


def _rate_cell(rate: str, row: tuple[str, Tuned]) -> Text:
    loss = row[1].losses.get(rate)
    text = "-" if loss is None else f"{loss:.4f}"
    return Strong(text) if rate == row[1].rate else text


def edge_sentences(choice: Choice) -> list[str]:
    """Return a sentence for each chosen rate at the edge of the grid."""
    arms: dict[str, list[str]] = {}
    for name, one in choice.arms.items():
        if edge(one.rate, choice.rates):
            arms.setdefault(one.rate, []).append(name)
    sentences = []
    for rate, names in arms.items():
        further, lowest = edge(rate, choice.rates), rate == choice.rates[0]
        grid = [further, *choice.rates] if lowest else [*choice.rates, further]
        sentences.append(
            f"Warning: the best rate of {', '.join(names)}, {rate}, is the {'lowest' if lowest else 'highest'} of the "
            f"grid, so a rate beyond it may be better; fix: extend the grid to {further}: "
            f'CONFIG_LEARNING_RATES="{" ".join(grid)}" under another CONFIG_STUDY_NAME.'
        )
    return sentences

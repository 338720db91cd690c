"""The samples of runs side by side, as a document. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from referee.pages.document import Block, BulletList, Document, Paragraph, Section, Table
from study.sampling.data import RunSamples, SamplingSettings

SIDE_BY_SIDE = 3  # columns that a terminal has room for
NEWLINE, SPACE = "↵", "·"


def samples_document(runs: Sequence[RunSamples], settings: SamplingSettings) -> Document:
    """Return one table a text where there are many runs, else one table with a column a run."""
    blocks: list[Block] = [Paragraph(_about(settings))]
    if len(runs) <= SIDE_BY_SIDE:
        rows = [
            [str(settings.seed + n), *(_shown(run.texts[n].text) for run in runs)]
            for n in range(settings.count)
        ]
        blocks.append(Table(["seed", *(run.run for run in runs)], rows, range(1, len(runs) + 1)))
    else:
        for n in range(settings.count):
            rows = [[run.run, _shown(run.texts[n].text)] for run in runs]
            blocks.append(Section(f"Seed {settings.seed + n}", [Table(["run", "text"], rows, (1,))]))
    blocks.append(Table.of(runs, {
        "run": lambda run: run.run,
        "variant": lambda run: run.variant,
        "iteration": lambda run: f"{run.iteration:,}",
        "tokens": lambda run: f"{sum(text.tokens for text in run.texts):,}",
        "nats per token": lambda run: f"{mean_nats(run):.3f}",
    }))  # fmt: skip
    blocks.append(BulletList([f"{run.run}: {note}" for run in runs for note in run.notes]))
    blocks.append(Paragraph(
        f"{NEWLINE} is the end of a line, {SPACE} one of several spaces. nats per token: minus the mean "
        "log-probability of the sampled tokens at temperature 1. A few texts are no evidence of which run is better; "
        "the report's verdict is."
    ))  # fmt: skip
    return Document("Samples: " + ", ".join(run.run for run in runs), blocks)


def mean_nats(run: RunSamples) -> float:
    """Mean over all sampled tokens of the run."""
    tokens = sum(text.tokens for text in run.texts)
    return sum(text.nats_per_token * text.tokens for text in run.texts) / tokens


def _shown(text: str) -> str:
    """Return a text for one cell, which keeps no blanks: line ends and repeated spaces become signs."""
    text = text.replace("\r\n", "\n").replace("\n", NEWLINE)
    return re.sub(r" {2,}|^ | $", lambda found: SPACE * len(found[0]), text)


def _about(settings: SamplingSettings) -> str:
    prompt = f'after "{_shown(settings.prompt)}"' if settings.prompt else "from the start of a document"
    how = [f"temperature {settings.temperature:g}"]
    how += [f"top_k {settings.top_k}"] if settings.top_k else []
    how += [f"top_p {settings.top_p:g}"] if settings.top_p < 1 else []
    same = "Equal seeds have equal random numbers in all runs."
    texts = "1 text" if settings.count == 1 else f"{settings.count} texts"
    return f"{texts} per run {prompt}, {', '.join(how)}. {same}"

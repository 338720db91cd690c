"""Write the table of every case with each model and mode: `python -m tests.referee.numerics.corpus.whole [FILE]`."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.referee.numerics.corpus.answers import Answer
from tests.referee.numerics.corpus.bisect_faults import BISECT_FAULTS
from tests.referee.numerics.corpus.cases import MODES, Case, Corpus
from tests.referee.numerics.corpus.clean import CLEAN
from tests.referee.numerics.corpus.faults import FAULTS
from tests.referee.numerics.corpus.kinds import KIND_FAULTS, KIND_PAIRS
from tests.referee.numerics.corpus.monitor_faults import MONITOR_FAULTS
from tests.referee.numerics.corpus.nets import NET_FAULTS, NET_PAIRS
from tests.referee.numerics.corpus.oracle_faults import ORACLE_FAULTS
from tests.referee.numerics.corpus.repeat_faults import REPEAT_FAULTS
from tests.referee.numerics.corpus.sound import SOUND
from tests.referee.numerics.corpus.training import NOT_ON_A_CPU, PUBLIC, TRAINING

RUN_FAULTS = (*ORACLE_FAULTS, *MONITOR_FAULTS, *BISECT_FAULTS, *REPEAT_FAULTS)
HEAD = ("case", "guide", "model", *MODES)
WRONG = "wrong: "


def compared(corpus: Corpus, cases: tuple[Case, ...]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case and model, with a cell for each mode."""
    for case in cases:
        for kind in case.kinds:
            answers = {mode: corpus.answer(case, kind, mode) for mode in MODES}
            cells = (cell(case, kind, mode, answer) for mode, answer in answers.items())
            yield case.name, case.guide, kind, *cells


def cell(case: Case, kind: str, mode: str, answer: Answer) -> str:
    """Return verdict, module and class of evidence, and whether they are wrong or not shown by the mode."""
    text = ", ".join(filter(None, (answer.verdict, answer.module, answer.evidence)))
    if mode in case.hidden:
        return f"not shown: {text}"
    return text if case.is_right(answer, kind) else WRONG + text


def of_one_run(corpus: Corpus) -> Iterator[tuple[str, ...]]:
    """Yield a row for each fault that two records do not show: its tool, and what that names."""
    for fault in RUN_FAULTS:
        right, named = fault.answer(corpus)
        yield fault.name, fault.guide, fault.tool, named if right else WRONG + named


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [*(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)), ""]


def main() -> None:
    torch.set_num_threads(1)  # a golden record has one thread
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        tables = (
            ("Faults", HEAD, list(compared(corpus, (*FAULTS, *NET_FAULTS, *KIND_FAULTS, *TRAINING)))),
            ("Clean pairs", HEAD, list(compared(corpus, (*CLEAN, *NET_PAIRS, *KIND_PAIRS, *SOUND)))),
            ("Faults of one run", (*HEAD[:2], "tool", "named"), list(of_one_run(corpus))),
        )
    kinds: list[tuple[str, ...]] = [
        (source, *pair) for source, known in PUBLIC.items() for pair in known.items()
    ]
    kinds += [(*name.split(" ", 1), f"not here: {why}") for name, why in NOT_ON_A_CPU.items()]
    lines = ["## Kinds of published corpora", "", *table(("corpus", "reproduction", "case"), kinds)]
    for title, head, rows in tables:
        answers = [text for row in rows for text in row[3:]]
        right = sum(not text.startswith(WRONG) for text in answers)
        lines += [f"## {title}: {right} of {len(answers)} answers right", "", *table(head, rows)]
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text("\n".join(lines))
    print("\n".join(line for line in lines if line.startswith("##") or WRONG in line))


if __name__ == "__main__":
    main()

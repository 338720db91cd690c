"""Judge every case with each model and mode, and write the table: `python -m tests.numerics.corpus.whole [FILE]`."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.numerics.corpus.bisect_faults import BISECT_FAULTS
from tests.numerics.corpus.cases import MODES, Case, Corpus
from tests.numerics.corpus.clean import CLEAN
from tests.numerics.corpus.faults import FAULTS
from tests.numerics.corpus.kinds import KIND_FAULTS, KIND_PAIRS
from tests.numerics.corpus.monitor_faults import MONITOR_FAULTS
from tests.numerics.corpus.nets import NET_FAULTS, NET_PAIRS
from tests.numerics.corpus.oracle_faults import ORACLE_FAULTS
from tests.numerics.corpus.repeat_faults import REPEAT_FAULTS

RUN_FAULTS = (*ORACLE_FAULTS, *MONITOR_FAULTS, *BISECT_FAULTS, *REPEAT_FAULTS)
HEAD = ("case", "guide", "model", "mode", "right", "verdict", "module", "evidence")


def compared(corpus: Corpus, cases: tuple[Case, ...]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case, model and mode."""
    for case in cases:
        for kind in case.kinds:
            for mode in MODES:
                found = corpus.answer(case, kind, mode)
                right = "yes" if case.is_right(found, kind) else "hidden" if mode in case.hidden else "NO"
                rest = (found.verdict, found.module or "-", found.evidence or "-")
                yield case.name, case.guide or "-", kind, mode, right, *rest


def of_one_run(corpus: Corpus) -> Iterator[tuple[str, ...]]:
    """Yield a row for each fault that two records do not show: its tool, and what that names."""
    for fault in RUN_FAULTS:
        right, named = fault.answer(corpus)
        yield fault.name, fault.guide or "-", fault.tool, "-", "yes" if right else "NO", named


def main() -> None:
    torch.set_num_threads(1)  # a golden record has one thread
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        tables = (
            ("Faults", HEAD, list(compared(corpus, (*FAULTS, *NET_FAULTS, *KIND_FAULTS)))),
            ("Clean pairs", HEAD, list(compared(corpus, (*CLEAN, *NET_PAIRS, *KIND_PAIRS)))),
            ("Faults of one run", (*HEAD[:2], "tool", *HEAD[3:5], "named"), list(of_one_run(corpus))),
        )
    lines = []
    for title, head, rows in tables:
        right = sum(row[4] != "NO" for row in rows)
        lines += [f"## {title}: {right} of {len(rows)} right", ""]
        lines += [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)] + [""]
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text("\n".join(lines))
    print("\n".join(line for line in lines if line.startswith("##") or "| NO |" in line))


if __name__ == "__main__":
    main()

"""Write a study's main table and figures as LaTeX for a paper. Needs no torch.

The figures are pgfplots code: text that an author edits, in the fonts of the paper, without a drawing library here.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpt2.system.errors import UserError
from gpt2.system.files import write_text
from pages.figure_tables import with_option
from pages.latex import render_latex
from pages.latex_figure import render_pgfplots
from pages.markup import Inline, Text, pieces
from study.records.curves import validation_curves
from study.report import figures, figures_final
from study.report.build import Report, ended_runs
from study.report.sections import ABOUT_DIFFERENCES, ABOUT_LOOKS, ABOUT_RESULTS, BAND, results_table
from study.report.sentences import seeds_text, uncounted
from study.report.summary import findings, no_verdict

FOLDER = "latex"
MAIN = r"""% An example that compiles with pdflatex. `make report FORMAT=latex` writes it once; edits are kept.
\documentclass{article}
\usepackage[margin=1in]{geometry}
\usepackage{booktabs}
\usepackage{pgfplots}
\pgfplotsset{compat=1.16}
\begin{document}
INPUTS
\end{document}
"""


def write_latex(report: Report, study_dir: Path) -> list[Path]:
    """Write table.tex, a file for each figure and, where it is absent, main.tex. Return their paths.

    Error: UserError if no run counts.
    """
    if not report.rows:
        raise UserError(f"{study_dir} has no finished run, so no table; fix: run `make`")
    word = re.sub(r"[^a-z0-9]+", "-", report.study.lower()).strip("-") or "study"
    parts = {"table": render_latex(results_table(report), caption(report), f"tab:{word}")}
    if spec := figures_final.differences(report):
        about = f"{report.study}: final differences. {ABOUT_DIFFERENCES}"
        parts["differences"] = render_pgfplots(with_option(spec, 0, 0), about, f"fig:{word}-differences")
    curves = validation_curves(ended_runs(report))
    if spec := figures.loss_curves(curves, None, "validation", True):
        names = [choice["label"] for choice in spec["choices"]]
        several = len({run.seed for run in report.used}) > 1
        about = (
            f"{report.study}: validation loss. {BAND if several else ''}{figures.coinciding(curves).strip()}"
        )
        drawn = with_option(spec, names.index("Vertical axis"), 1)
        parts["validation"] = render_pgfplots(drawn, about.strip(), f"fig:{word}-validation")
    folder = study_dir / FOLDER
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.tex" for name in parts]
    for path, text in zip(paths, parts.values(), strict=True):
        write_text(path, f"{text}\n")
    for name in {"differences", "validation"} - set(parts):
        (folder / f"{name}.tex").unlink(missing_ok=True)  # of an earlier report
    main = folder / "main.tex"
    if not main.exists():
        inputs = "\n".join(f"\\input{{{name}}}" for name in parts)
        write_text(main, MAIN.replace("INPUTS", inputs))
    return [*paths, main]


def caption(report: Report) -> Text:
    """The caption: the content of the table, the sentence of each verdict, and the runs that are not counted."""
    seeds = seeds_text(len({run.seed for run in report.used}))
    parts: list[Inline] = [f"{report.study}, {seeds}: perplexity per {report.unit} {ABOUT_RESULTS}"]
    sentences: list[Text] = [finding.sentence for finding in findings(report)]
    sentences += [ABOUT_LOOKS] if report.verdicts else []
    why = pieces(no_verdict(report))
    sentences += [why[0] if why else "", uncounted(report), *report.damaged, *report.marks]
    for sentence in sentences:
        parts += [" ", *pieces(sentence)] if pieces(sentence) else []
    return tuple(parts)

"""Write report.json, report.md, report.html and table.tex, and render the terminal's summary."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from referee.pages.document import render_markdown
from referee.pages.document import render_terminal as render_document
from referee.pages.html_page import render_html
from referee.pages.latex import render_latex
from referee.pages.markup import Inline, Text, pieces
from runtime.errors import UserError
from runtime.files import DamagedFileError, read_json, write_json, write_text
from study.evaluation import attention_data as data
from study.evaluation.lm_eval_page import downstream_json
from study.report.report_data import Report, as_json, build_report
from study.report.report_page import report_document, terminal_document
from study.report.report_sections import ABOUT_LOOKS, ABOUT_RESULTS, results_table
from study.report.report_sentences import seeds_text, uncounted
from study.report.report_summary import findings, no_verdict

LATEX_FILE = "table.tex"
REFRESH_SECONDS = 60  # of an open page, while runs of the study are unfinished
RUN_INPUTS = ("run", "metrics", "hellaswag", "choice", "validation_windows", "lm_eval")
INPUTS = ("plan*.json", "expected.json", data.FILE, *(f"runs/*/{name}*.json*" for name in RUN_INPUTS))


def write_report(study_dir: Path) -> Report:
    """Rebuild report.html, report.md and report.json from the records, each replaced at once."""
    inputs = _inputs(study_dir)
    report = build_report(study_dir)
    document = report_document(report, study_dir)
    write_text(study_dir / "report.html", render_html(document, REFRESH_SECONDS if report.pending else 0))
    write_text(study_dir / "report.md", render_markdown(document))
    content = as_json(report) | downstream_json(study_dir, report.used)
    write_json(study_dir / "report.json", content | {"inputs": inputs})  # last: it marks the end
    return report


def render_terminal(report: Report) -> str:
    """The report in lines of at most 100 columns."""
    return render_document(terminal_document(report))


def write_latex(report: Report, study_dir: Path) -> Path:
    """Write table.tex and return its path. UserError if no run counts."""
    if not report.rows:
        raise UserError(f"{study_dir} has no finished run, so no table; fix: run `make`")
    label = re.sub(r"[^a-z0-9]+", "-", report.study.lower()).strip("-") or "study"
    path = study_dir / LATEX_FILE
    write_text(path, f"{render_latex(results_table(report), latex_caption(report), f'tab:{label}')}\n")
    return path


def latex_caption(report: Report) -> Text:
    """The caption: the content of the table, the sentence of each verdict, and the runs that are not counted."""
    seeds = seeds_text(len({run.seed for run in report.used}))
    parts: list[Inline] = [f"{report.study}, {seeds}: perplexity per {report.unit} {ABOUT_RESULTS}"]
    sentences: list[Text] = [report.experiment.text, *(finding.sentence for finding in findings(report))]
    sentences += [ABOUT_LOOKS] if report.verdicts else []
    why = pieces(no_verdict(report))
    sentences += [why[0] if why else "", uncounted(report), *report.damaged]
    for sentence in sentences:
        parts += [" ", *pieces(sentence)] if pieces(sentence) else []
    return tuple(parts)


def is_current(study_dir: Path) -> bool:
    """Whether the report is complete and was built from the present files."""
    if not all((study_dir / name).exists() for name in ("report.html", "report.md", data.FILE)):
        return False
    try:
        written = read_json(study_dir / "report.json")
    except (FileNotFoundError, DamagedFileError):
        return False
    return isinstance(written, dict) and written.get("inputs") == _inputs(study_dir)


def _inputs(study_dir: Path) -> str:
    """Return a digest of the names, sizes and times of the files that a report reads."""
    paths = sorted(path for pattern in INPUTS for path in study_dir.glob(pattern))
    states = [(str(path.relative_to(study_dir)), path.lstat()) for path in paths]
    found = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    return hashlib.sha256(repr(found).encode()).hexdigest()

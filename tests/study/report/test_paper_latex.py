"""`make report FORMAT=latex`: the numbers of report.json, the sentence of the verdict, and a table that LaTeX reads."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from referee.pages.document import Table
from referee.pages.latex import render_latex
from referee.pages.markup import Code, Strong
from runtime.errors import UserError
from scripts import report as command
from study.report.report_page import LATEX_FILE, write_latex, write_report
from tests.study.browser import printed
from tests.study.sample_records import VARIANTS, a_study, edit

MAIN = r"""\documentclass{article}
\usepackage[margin=1in]{geometry}
\usepackage{booktabs}
\begin{document}
\input{table}
\end{document}
"""


def written(study: Path) -> tuple[str, dict[str, Any]]:
    """The LaTeX table of a study, and its report.json."""
    path = write_latex(write_report(study), study)
    return path.read_text(), json.loads((study / "report.json").read_text())


def plain(cell: str) -> str:
    """A cell as text."""
    cell = re.sub(r"\{\\scriptsize (.*)\}", r"\1", cell)
    for sign, text in (("{[}", "["), ("{]}", "]"), ("$-$", "-"), ("~", " "), (r"\%", "%"), (r"\_", "_")):
        cell = cell.replace(sign, text)
    return cell.strip()


def rows_of(table: str) -> list[list[str]]:
    """The rows of the table, each with the intervals of its second line."""
    body = table.partition("\\midrule\n")[2].partition("\\bottomrule")[0]
    found: list[list[str]] = []
    for line in body.splitlines():
        cells = [plain(cell) for cell in re.sub(r" \\\\(\[.*\])?$", "", line).split(" & ")]
        if cells[0]:
            found.append(cells)
        else:
            found[-1] = [f"{one} {two}".strip() for one, two in zip(found[-1], cells, strict=True)]
    return found


def test_every_interval_of_the_table_is_that_of_report_json(tmp_path: Path) -> None:
    study = a_study(tmp_path / "a_study", effect=-0.02)
    table, report = written(study)
    heads = re.search(r"\\toprule\n(.*) \\\\", table)
    assert heads
    assert heads[1].split(" & ")[:6] == [
        "variant",
        "seeds",
        "final perplexity",
        "bits per byte",
        "best perplexity",
        "final against control arms",
    ]
    rows = {row[0]: row for row in rows_of(table)}
    assert list(rows) == list(VARIANTS)
    for row in report["rows"]:
        cells = rows[row["variant"]]
        assert cells[1] == "3"
        printed(cells[2], row["final_loss"], True)
        printed(cells[4], row["best_loss"], True)
        printed(cells[5], row["against_controls"], False)


def test_the_caption_has_the_sentence_of_the_verdict_and_the_runs_that_do_not_count(tmp_path: Path) -> None:
    study = a_study(tmp_path / "a_study", effect=-0.02)
    edit(study, "RAALL1", status="failed", error="NotFiniteError: loss nan")
    table, report = written(study)
    found = re.search(r"\\caption\{(.*)\}\n\\label\{tab:a-study\}", table)
    assert found
    said = plain(found[1])
    assert said.startswith("a_study, 3 seeds: perplexity per GPT-2 token")
    assert r"\textbf{RALEARN} (exploratory)" in said
    numbers = said.replace(" against the control arms", "").partition("(perplexity")[2]
    printed(numbers, report["verdicts"][0]["test"]["difference"], False)
    assert "1 of 15 runs is not counted: RAALL1" in said
    assert "it holds at all looks at the study together" in said  # so it differs from that of the table


def test_a_study_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    study = a_study(tmp_path / "s", seeds=1, variants=("B",))
    edit(study, "B0", status="failed", error="x")
    with pytest.raises(UserError, match="no finished run, so no table; fix: run `make`"):
        written(study)
    assert not (study / LATEX_FILE).exists()


def run_command(monkeypatch: pytest.MonkeyPatch, flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts.report"])
    monkeypatch.setenv("MAKEFLAGS", flags)
    return command.main()


def test_the_command_writes_the_files_and_refuses_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = a_study(tmp_path / "s", seeds=1)
    assert run_command(monkeypatch, f" -- STUDY={study}") == 0
    assert not (study / LATEX_FILE).exists()
    assert run_command(monkeypatch, f" -- STUDY={study} FORMAT=latex") == 0
    assert f"LaTeX: {study / LATEX_FILE}" in capsys.readouterr().out
    message = r"^FORMAT is pdf; a report has the format latex; fix: make report FORMAT=latex$"
    with pytest.raises(UserError, match=message):
        run_command(monkeypatch, f" -- STUDY={study} FORMAT=pdf")
    monkeypatch.setattr(sys, "argv", ["scripts.report", "--format=latex", str(study)])
    assert command.main() == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
def test_pdflatex_compiles_the_files_and_every_sign(tmp_path: Path) -> None:
    study = a_study(tmp_path / "50 %_x#&~^{}é", effect=-0.02)
    written(study)
    signs = [*map(chr, [*range(32, 127), *range(161, 256)]), "→", "中", "σ", "≤", "…", "---", "''", "*[x]"]
    cells = [["*", "[1]"], *([sign, (Code(sign * 2), " ", Strong(sign), sign)] for sign in signs)]
    tables = [
        render_latex(Table(["*", "[x]"], cells[place : place + 40])) for place in range(0, len(cells), 40)
    ]
    (study / "signs.tex").write_text("\n\n\\newpage ".join(tables))
    (study / "main.tex").write_text(MAIN)
    (study / "both.tex").write_text(MAIN.replace("\\end{document}", "\\input{signs}\n\\end{document}"))
    for name in ("main", "both"):
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", name],
            cwd=study, capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:]
        assert (study / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    log = (study / "main.log").read_text(errors="replace")
    assert "Overfull" not in log

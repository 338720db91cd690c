"""A table as LaTeX: every sign of data is escaped, environments are balanced, and cells are those of the table."""

import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from referee.pages.document import Table
from referee.pages.latex import NEEDS, escape_latex, render_latex
from referee.pages.markup import number_with_detail

SPECIAL = "\\{}$&%#_~^"


def test_each_special_sign_is_text() -> None:
    for sign in SPECIAL:
        escaped = escape_latex(f"a{sign}b")
        assert escaped.startswith("a\\")
        assert escaped.endswith("b")
    assert escape_latex("50 % & W_Q {x} #1") == r"50~\% \& W\_Q \{x\} \#1"
    assert escape_latex("-0.24 % [-1.43 %, +0.96 %]") == r"$-$0.24~\% {[}$-$1.43~\%, +0.96~\%{]}"
    assert escape_latex("a-b --x 2026-11") == "a-b -{}-x 2026-11"
    assert escape_latex("31.0 ± 0.5 % †") == r"31.0 $\pm$ 0.5~\% \dag{}"
    assert escape_latex("中") == "{[}U+4E2D{]}"


def bare(line: str) -> str:
    """LaTeX without escapes, commands and groups: what remains are signs that stand for themselves."""
    line = re.sub(r"\\[a-zA-Z]+|\\[\\{}$&%#_~^]", "", line)
    return re.sub(r"\$[^$]*\$", "", line)


@given(st.text())
def test_no_sign_of_data_takes_effect(value: str) -> None:
    line = escape_latex(value)
    assert "\n" not in line
    rest = bare(line)
    assert not set(rest) & set("\\$&%#_^")
    assert rest.count("{") == rest.count("}")
    assert all(sign.isascii() or unicodedata.category(sign)[0] == "L" for sign in line)


ROWS = [
    ["B", "54.84 [53.60, 56.11]", "-"],
    ["RA_X", "53.59 [52.42, 54.80]", "-2.27 % [-2.88 %, -1.66 %]"],
    ["*", "1", "no [one]"],
]
TABLE = Table(["variant", "perplexity", "against B"], [[number_with_detail(c) for c in row] for row in ROWS])


def test_a_tabular_has_the_cells_of_the_table_and_intervals_on_a_second_line() -> None:
    needs, *head = render_latex(TABLE, "a & b", "tab:x").splitlines()
    assert (needs, head[4:6]) == (NEEDS, [r"\caption{a \& b}", r"\label{tab:x}"])
    lines = ["", *head[7:-1]]
    assert lines[:3] == ["", r"\begin{tabular}{@{}lrr@{}}", r"\toprule"]
    assert lines[3:5] == [r"variant & perplexity & against B \\", r"\midrule"]
    assert lines[5] == r"B & 54.84 & - \\[-2pt]"
    assert lines[6] == r" & {\scriptsize {[}53.60, 56.11{]}} &  \\[2pt]"
    assert lines[7] == r"RA\_X & 53.59 & $-$2.27~\% \\[-2pt]"
    assert lines[9] == r"{*} & 1 & no {[}one{]} \\"  # a star after \\ would belong to it
    assert lines[10:] == [r"\bottomrule", r"\end{tabular}"]

"""A table as LaTeX for a paper: booktabs rules, escaped text, each interval below its number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from referee.pages.document import Table
from referee.pages.markup import Code, Detail, Inline, Strong, Text, format_numbers, pieces, single_line

NEEDS = "% \\usepackage{booktabs}"
# pdflatex knows ASCII and Latin-1; a sign outside both is written by its code.
SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "`": r"\textasciigrave{}", "[": "{[}", "]": "{]}", "*": "{*}",
    "\u2212": "$-$", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$", "†": r"\dag{}",
    "\u00a0": "~", "–": r"\textendash{}", "—": r"\textemdash{}", "’": "'", "‘": "`", "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}", "…": r"\dots{}", "→": r"$\to$", "²": "$^2$", "³": "$^3$", "¹": "$^1$",
    "µ": r"$\mu$", "¬": r"$\lnot$", "°": r"$^\circ$",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega",
}  # fmt: skip


def escape_latex(value: str) -> str:
    """Escape one line of data for LaTeX text. Numbers are as in HTML, with a minus sign."""
    line = format_numbers(single_line(value))
    line = "".join(map(_sign, line))
    return re.sub(r"([-'])(?=\1)", r"\1{}", line)  # two of them would be a dash or a quotation mark


def _sign(sign: str) -> str:
    if sign in GREEK:
        return f"$\\{GREEK[sign]}$"
    if sign in SIGNS:
        return SIGNS[sign]
    known = sign.isascii() or (sign.isalpha() and ord(sign) < 256 and sign not in "ÐðÞþ")
    return sign if known else f"{{[}}U+{ord(sign):04X}{{]}}"


def to_latex(text: Text) -> str:
    """Render inline text as LaTeX on one line."""
    return "".join(map(_latex, pieces(text))).strip()


def _latex(part: Inline) -> str:
    match part:
        case str():
            return escape_latex(part)
        case Strong(text):
            return f"\\textbf{{{escape_latex(text)}}}"
        case Code(text):
            return f"\\texttt{{{escape_latex(text)}}}"
        case Detail(text):
            return f" {escape_latex(text)}"
    return escape_latex(part.text)


def render_latex(table: Table, caption: Text, label: str) -> str:
    """The table as a float. label: letters, digits, colons and hyphens.

    Details of the cells of a row, such as intervals, are on a second, smaller line.
    """
    left = {0, *table.text_columns}
    columns = "".join("l" if place in left else "r" for place in range(len(table.headings)))
    lines = [NEEDS, "\\begin{table}", "\\centering", "\\small", "\\setlength{\\tabcolsep}{4pt}"]
    lines += [f"\\caption{{{to_latex(caption)}}}", f"\\label{{{label}}}", "\\medskip"]
    lines += [f"\\begin{{tabular}}{{@{{}}{columns}@{{}}}}", "\\toprule"]
    lines += [f"{' & '.join(map(to_latex, table.headings))} \\\\", "\\midrule"]
    for row in table.rows:
        lines += _row(row)
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"])


def _row(row: Sequence[Text]) -> list[str]:
    """A line of the table, and a second one where a cell has a detail."""
    cells = [pieces(cell) for cell in row]
    first = [to_latex(tuple(part for part in cell if not isinstance(part, Detail))) for cell in cells]
    second = [
        " ".join(escape_latex(part.text) for part in cell if isinstance(part, Detail)) for cell in cells
    ]
    if not any(second):
        return [f"{' & '.join(first)} \\\\"]
    small = [f"{{\\scriptsize {text}}}" if text else "" for text in second]
    return [f"{' & '.join(first)} \\\\[-2pt]", f"{' & '.join(small)} \\\\[2pt]"]

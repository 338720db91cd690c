"""The sections of report.html below its figures: what the study can see, HellaSwag, the runs, the method, the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from pages.html import Place, bullets, marked, note, section, swatch, table, text, typeset
from study.records.runs import BASELINE, Run
from study.report import figures_final
from study.report.build import Report
from study.report.method import method as method_lines
from study.report.sentences import item_result, perplexity, reason_text, score
from study.report.summary import run_names, sensitivity_sentences

LONG = 40  # runs, above which their list is folded
MANY = 8  # notes, above which they are
ENVIRONMENT = {  # of the record's environment, as the page names it
    "python": "Python",
    "numpy": "NumPy",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "cudnn": "cuDNN or MIOpen",
    "float32_matmul": "float32 products",
    "threads": "CPU threads",
    "platform": "platform",
}


def power(report: Report) -> str:
    """The effects that the seeds can detect, and whether the control arms vary alike."""
    return bullets([typeset(line) for line in sensitivity_sentences(report)])


def hellaswag(report: Report, names: Sequence[str], figure: Place) -> str:
    """Accuracies with chance, and the paired test of the items where the runs have kept them."""
    if all(row.hellaswag.acc is None for row in report.rows):
        reasons = dict.fromkeys(row.hellaswag.absent for row in report.rows)
        return section("HellaSwag", *(f"<p>Not run: {marked(reason_text(reason))}</p>" for reason in reasons))
    rows = [
        [
            swatch(row.variant, names),
            score(row.hellaswag),
            score(row.hellaswag, norm=True),
            f"{row.hellaswag.items:,}" if row.hellaswag.items else "-",
            f"{row.hellaswag.runs} of {len(row.seeds)}",
        ]
        for row in report.rows
    ]
    notes = [
        f"{text(row.variant)} not run: {marked(reason_text(row.hellaswag.absent))}"
        for row in report.rows
        if row.hellaswag.acc is None
    ]
    if any(row.hellaswag.near_chance for row in report.rows):
        notes.insert(0, "† Within two standard errors of chance: no sign of skill.")
    caption = (
        "Filled: acc. Open: acc_norm. Bars: one standard error of the items, which more seeds do not shrink."
    )
    return section(
        "HellaSwag",
        figure("hellaswag", figures_final.hellaswag(report), caption),
        table(["variant", "acc", "acc_norm", "items", "runs"], rows),
        *(note(line) for line in notes),
        _items(report, names),
    )


def _items(report: Report, names: Sequence[str]) -> str:
    said = {(test.variant, test.measure): item_result(test) for test in report.items}
    if not said:
        return ""
    tested = dict.fromkeys(variant for variant, _ in said)
    rows = [
        [swatch(name, names), *(typeset(said.get((name, key), "-")) for key in ("acc", "acc_norm"))]
        for name in tested
    ]
    return (
        f"<h3>Item by item against {BASELINE}</h3>"
        + table(["variant", "acc: items won / lost", "acc_norm: items won / lost"], rows)
        + note("McNemar's exact test, adjusted by Holm. It compares these trained runs on these items and contains "
               "<strong>no seed noise</strong>.")
    )  # fmt: skip


def runs(report: Report) -> str:
    """Every run with a link to its record, folded where they are many."""
    made = table(
        ["run", "status", "counted", "perplexity", "tokens", "training s"],
        [_run(run) for run in report.runs],
        prose=(2,),
    )
    if len(report.runs) > LONG:
        made = f"<details><summary>{len(report.runs):,} runs</summary>{made}</details>"
    return section("Runs", note(marked(run_names(report))), made)


def _run(run: Run) -> list[str]:
    seen, progress = run.record.get("validation") or {}, run.record.get("progress") or {}
    loss, seconds = seen.get("loss"), progress.get("train_seconds")
    link = f'<a href="runs/{quote(run.name)}/run.json">{text(run.name)}</a>'
    return [
        text(run.name) if run.status == "missing" else link,
        text(run.status),
        "yes" if run.used else f"no: {text(run.why_not)}",
        perplexity(loss) if isinstance(loss, (int, float)) else "-",
        f"{progress['tokens']:,.0f}" if progress.get("tokens") is not None else "-",
        f"{seconds:,.1f}" if seconds is not None else "-",
    ]


def notes(report: Report) -> str:
    """What the plan and the runs noted, folded where it is much."""
    made = bullets([text(line) for line in report.notes])
    if len(report.notes) > MANY:
        made = f"<details><summary>{len(report.notes):,} notes</summary>{made}</details>"
    return section("Notes", made)


def method(report: Report) -> str:
    """How the numbers are made, and what the runs were in full."""
    said = bullets([marked(text(line.removeprefix("- "))) for line in method_lines(report)[2:]])
    used = [run for run in report.runs if run.used]
    facts = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in _facts(report, used) if value)
    return section("Method", said) + (
        section("Experiment and fingerprint", f"<dl>{facts}</dl>") if used else ""
    )


def _facts(report: Report, used: Sequence[Run]) -> list[tuple[str, str]]:
    """What the runs were: each value once, with the number of runs where not all have it."""
    records = [run.record for run in used]
    facts = [(name.replace("_", " "), _said([seen["target"].get(name) for seen in records]))
             for name in ("name", "device", "dtype", "attention_backend", "torch", "driver")]  # fmt: skip
    facts[0] = ("target", facts[0][1])
    batches = [
        " · ".join(
            f"{key.replace('_', ' ')} {value:,}"
            for key, value in seen["batch"].items()
            if isinstance(value, int)
        )
        for seen in records
    ]
    facts.append(("batch", _said(batches)))
    facts.append(
        ("parameters", _said([seen["parameters"] and f"{seen['parameters']:,}" for seen in records]))
    )
    budget = " · ".join(f"{str(key).replace('_', ' ')} {value}" for key, value in report.budget.items())
    facts.append(("budget", text(budget)))
    facts.append(("validation tokens", f"{report.validation_tokens:,}" if report.validation_tokens else ""))
    commits = [
        f"{seen['commit']}{' with uncommitted changes' if seen['dirty'] else ''}" if seen["commit"] else None
        for seen in records
    ]
    facts.append(("commit", _code(commits)))
    facts.append(("config SHA-256", _code([seen["config_sha256"] for seen in records])))
    for entry in dict.fromkeys(key for seen in records for key in seen["fingerprint"]):
        if entry != "initial_weights":
            facts.append(
                (f"fingerprint: {text(entry)}", _code([seen["fingerprint"].get(entry) for seen in records]))
            )
    weights = {run.seed: run.record["fingerprint"].get("initial_weights") for run in used}
    shown_weights = "<br>".join(
        f"seed {seed}: {text(str(value))}" for seed, value in list(weights.items())[:LONG]
    )
    facts.append(("fingerprint: initial weights", f"<code>{shown_weights}</code>"))
    return facts + _environment([seen.get("environment") or {} for seen in records])


def _said(values: Sequence[Any]) -> str:
    """Each value once, with the number of runs where not all have it; None is no value."""
    count = Counter(str(value) for value in values if value is not None)
    return "<br>".join(
        text(value) + (f" ({number} run{'' if number == 1 else 's'})" if number < len(values) else "")
        for value, number in count.most_common()
    )


def _code(values: Sequence[Any]) -> str:
    made = _said(values)
    return f"<code>{made}</code>" if made else ""


def _environment(runs: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """What the runs' numbers may depend on besides their settings: versions, variables, and the code's hashes."""
    facts = [(name, _said([seen.get(key) for seen in runs])) for key, name in ENVIRONMENT.items()]
    variables = _named([seen.get("variables") or {} for seen in runs], "=")
    nothing = "none set that changes numbers" if any(runs) else ""
    facts.append(("variables", f"<code>{'<br>'.join(variables)}</code>" if variables else nothing))
    modules = _named([seen.get("code") or {} for seen in runs], " ")
    listed = f"<code>{'<br>'.join(modules)}</code>"
    folded = f"<details><summary>{len(modules)} modules</summary>{listed}</details>"
    return [*facts, ("code, SHA-256", folded if modules else "")]


def _named(tables: Sequence[dict[str, Any]], sign: str) -> list[str]:
    """Lines of name, sign and value over the runs' tables, by name."""
    names = sorted({name for own in tables for name in own})
    return [_said([f"{name}{sign}{own[name]}" if name in own else None for own in tables]) for name in names]

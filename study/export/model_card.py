"""The model card of an exported run: what was trained, its scores, and what its study allows one to say.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2.artifacts.run_record import RunRecord
from gpt2.system.errors import UserError
from pages.document import Block, BulletList, Document, Paragraph, Section, Table, render_markdown
from pages.markup import to_plain
from ra.names import is_control_arm
from study.report.build import build_report
from study.report.summary import findings, no_verdict

FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- attention-ablation
---

"""
LOAD = """

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}"{options})
tokenizer = AutoTokenizer.from_pretrained("{folder}"{options})
```
"""


REMOTE_CODE = (
    "transformers has no class for this model, so the folder has Python files. from_pretrained runs them only with "
    "trust_remote_code=True. They are copies of the trainer's files; the first line of each names its origin."
)


def model_card(
    run_dir: Path, record: RunRecord, facts: Sequence[str], folder: str, arm: Sequence[str] = ()
) -> str:
    """Return README.md. facts: about the exported weights. arm: for remote code, the definitions of its parts."""
    said = _verdicts(run_dir, record)
    blocks: list[Block] = [
        Paragraph(
            f"Run {record.run}: variant {record.variant}, seed {record.seed}, trained by an ablation study of "
            f"attentions. It is one run of a comparison, not a model for use."
        ),
        Section("What the study says", [BulletList(said)]),
        Section("Scores", [Table(["measure", "value"], _scores(record))]),
        Section("Weights", [BulletList(list(facts))]),
    ]
    if arm:
        blocks.insert(
            2, Section("Where it differs from GPT-2", [BulletList(list(arm)), Paragraph(REMOTE_CODE)])
        )
    text = render_markdown(Document(f"{record.variant}, seed {record.seed}", blocks))
    return (
        FRONT_MATTER
        + text.rstrip("\n")
        + LOAD.format(folder=folder, options=", trust_remote_code=True" if arm else "")
    )


def _verdicts(run_dir: Path, record: RunRecord) -> list[str]:
    """Return the sentences of the report: that of the variant where it has one, else those of the study."""
    variant = str(record.variant)
    if run_dir.resolve().parent.name != "runs":
        return ["The run is in no study's folder, so it was compared with nothing."]
    try:
        report = build_report(run_dir.resolve().parents[1])
    except UserError as error:
        return [f"The study's records cannot be read, so nothing is claimed: {error}"]
    found = [item for item in findings(report) if item.label.text == variant] or findings(report)
    sentences = [" ".join(filter(None, map(to_plain, (item.sentence, item.reason)))) for item in found]
    if is_control_arm(variant):
        others = any(row.control and row.variant != variant for row in report.rows)
        rest = ": its differences to the other control arms are noise" if others else ""
        sentences.insert(0, f"{variant} is a control arm{rest}.")
    return sentences + ([to_plain(no_verdict(report))] if no_verdict(report) else [])


def _scores(record: RunRecord) -> list[list[str]]:
    rows = []
    if record.progress is not None:
        rows.append(["tokens of training", f"{record.progress.tokens:,}"])
        rows.append(["updates", f"{record.progress.iterations:,}"])
    if record.validation is not None and record.validation.loss is not None:
        rows.append(["validation loss, nats per token", f"{record.validation.loss:.4f}"])
        rows.append(["validation perplexity", f"{record.validation.perplexity:.2f}"])
    for name, text in (record.eval_sets or {}).items():
        if text.word_perplexity is not None:
            rows.append([f"{name}: perplexity by word", f"{text.word_perplexity:,.2f}"])
        if text.bits_per_byte is not None:
            rows.append([f"{name}: bits per byte", f"{text.bits_per_byte:.3f}"])
    if record.hellaswag is not None and record.hellaswag.acc is not None:
        error = record.hellaswag.acc_stderr
        spread = "" if error is None else f" ± {100 * error:.1f}"
        items = f", {record.hellaswag.items:,} items" if record.hellaswag.items else ""
        rows.append(["HellaSwag accuracy", f"{100 * record.hellaswag.acc:.1f}{spread} %{items}"])
    if record.commit:
        rows.append(
            ["commit of the trainer", record.commit + (", with local changes" if record.dirty else "")]
        )
    return rows

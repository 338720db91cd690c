"""`make grpo`: run or resume the GRPO study of .config, judge its arms, write the page."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo.grpo_settings import GrpoSettings
from referee.pages.document import Document, render_markdown, render_terminal
from referee.pages.html_page import render_html
from runtime.dotconfig import read_symbols, read_text
from runtime.errors import UserError, run_command
from runtime.files import write_json, write_text
from study.grpo_page import as_json, build_report, grpo_document
from study.grpo_study import check, run_study
from study.kconfig_rules import load_strictly
from study.make_arguments import refuse_assignments

CONFIG = Path(".config")


def main() -> None:
    if len(sys.argv) > 1:
        raise UserError("scripts.grpo takes no arguments; fix: make grpo")
    refuse_assignments()
    if not CONFIG.exists():
        raise UserError("there is no .config; fix: make defconfig-grpo-gsm8k")
    config = read_text(CONFIG)
    load_strictly(config, str(CONFIG))
    symbols = read_symbols(CONFIG)
    if not symbols.flag("GRPO"):
        raise UserError(".config is of no GRPO study; fix: make defconfig-grpo-gsm8k")
    settings = GrpoSettings.from_symbols(symbols)
    identity = check(settings)
    print(
        f"{settings.name}: {settings.model}, {len(settings.runs)} runs of {len(settings.arms)} arms",
        flush=True,
    )
    run_study(settings, config, lambda: write_report(settings, identity))
    print(render_terminal(write_report(settings, identity)))
    print(f"\ngrpo: {settings.folder / 'grpo.html'} (and .md, .json)")


def write_report(settings: GrpoSettings, identity: str) -> Document:
    """Write grpo.html, grpo.md and grpo.json from the records."""
    report = build_report(settings, identity)
    document = grpo_document(report)
    write_text(settings.folder / "grpo.html", render_html(document))
    write_text(settings.folder / "grpo.md", render_markdown(document))
    write_json(settings.folder / "grpo.json", as_json(report))
    return document


if __name__ == "__main__":
    run_command(main)

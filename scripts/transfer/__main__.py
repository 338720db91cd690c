"""`make transfer STUDIES="results/a" PLATFORMS="bf16 int8 int4 foreign:1e-2" [OUT=folder]`: train here, evaluate there.

Every counted run is evaluated on every platform. Existing evaluations are kept, so that `make transfer` continues after
an interruption. Without STUDIES it is the study of .config, without PLATFORMS those of this file. The page goes to OUT,
by default to the first study: transfer.html, .md and .json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aqn.platforms import parse_platform
from gpt2.config.dotconfig import read_symbols
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import UserError, run_command
from gpt2.system.files import write_json, write_text
from kconfig.arguments import command_arguments
from pages.document import render_markdown, render_terminal
from pages.page import render_html
from study.runner.settings import StudySettings

CONFIG = Path(".config")
PLATFORMS = (
    "int8",
    "int4",
    "int4:row",
    "int3",
    "int2",
    "foreign:1e-3",
    "foreign:1e-2",
    "foreign:3e-2",
    "foreign:1e-1",
)


def configured_study() -> Path:
    """Return the folder of the study of .config."""
    if not CONFIG.exists():
        raise UserError(
            "there is no .config; fix: make transfer STUDIES=results/NAME, or make defconfig-aqn-transfer"
        )
    settings = StudySettings.from_symbols(read_symbols(CONFIG))
    return settings.results_dir / settings.name


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.transfer")
    parser.add_argument("studies", nargs="*", type=Path)
    parser.add_argument("--platforms", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("PLATFORMS", "OUT"), paths="STUDIES"))
    studies, names = list(dict.fromkeys(arguments.studies)), arguments.platforms.split() or list(PLATFORMS)
    studies = studies or [configured_study()]
    for study in studies:
        if not (study / "runs").is_dir():
            raise UserError(f"{study} is no study; fix: STUDIES= folders such as results/gpt2-ra-ablation")
    for name in names:
        parse_platform(name)
    export_environment()  # before torch is imported
    from study.transfer.evaluate import evaluate_run
    from study.transfer.matrix import as_json, build_transfer, counted_runs
    from study.transfer.transfer_page import transfer_document

    runs = counted_runs(studies)
    for number, (study, run) in enumerate(runs, 1):
        evaluate_run(study / "runs" / run.name, names)
        print(f"[{number}/{len(runs)}] {run.name} evaluated on {len(names)} platforms", flush=True)
    report = build_transfer(studies, names)
    document = transfer_document(report)
    folder = arguments.out or studies[0]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "transfer.html", render_html(document))
    write_text(folder / "transfer.md", render_markdown(document))
    write_json(folder / "transfer.json", as_json(report))
    print(render_terminal(document))
    print(f"\ntransfer: {folder / 'transfer.html'} (and .md, .json)")


if __name__ == "__main__":
    run_command(main)

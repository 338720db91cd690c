"""`make transfer STUDIES="results/a" PLATFORMS="bf16 int8 int4 foreign:1e-2" [OUT=folder]`: train here, evaluate there.

Every counted run is evaluated on every platform. Existing evaluations are kept, so that `make transfer` continues after
an interruption. Without STUDIES it is the study of .config, without PLATFORMS those of this file and those of
other machines. The page goes to OUT, by default to the first study: transfer.html, .md and .json.

On another machine than that of training the platforms are called bf16@w7900, by MACHINE or the name of the device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt2.platforms import machine_name, parse_platform
from referee.pages.document import render_markdown, render_terminal
from referee.pages.html_page import render_html
from runtime.dotconfig import read_symbols
from runtime.errors import UserError, run_command
from runtime.files import write_json, write_text
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments
from study.study_settings import StudySettings

CONFIG = Path(".config")
PLATFORMS = "bf16 int8 int4 int4:row int3 int3:row int2 foreign:1e-2 foreign:3e-2 foreign:1e-1 foreign:3e-1"


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
    parser.add_argument("--machine", default="")
    arguments = parser.parse_args(command_arguments(("PLATFORMS", "OUT", "MACHINE"), paths="STUDIES"))
    studies, names = list(dict.fromkeys(arguments.studies)), (arguments.platforms or PLATFORMS).split()
    if arguments.machine:
        machine_name(arguments.machine)
    studies = studies or [configured_study()]
    for study in studies:
        if not (study / "runs").is_dir():
            raise UserError(f"{study} is not a study; fix: STUDIES= folders such as results/gpt2-ra-ablation")
    wanted = [parse_platform(name) for name in names]
    local = [one.name for one in wanted if not one.machine]
    labels = [one.label for one in wanted if one.machine]
    export_environment()  # before torch is imported
    from study.evaluation.transfer_matrix import as_json, build_transfer, counted_runs, elsewhere
    from study.evaluation.transfer_runs import evaluate_run
    from study.report.transfer_page import transfer_document

    runs, at_home, notes = counted_runs(studies), True, dict[str, None]()
    for number, (study, run) in enumerate(runs, 1):
        folder = study / "runs" / run.name
        found = evaluate_run(folder, local, arguments.machine)
        labels = [one.platform for one in found.results] + labels
        labels += [] if arguments.platforms else elsewhere(folder, run.record)
        at_home, notes = at_home and found.home is not None, notes | dict.fromkeys(found.notes)
        print(f"[{number}/{len(runs)}] {run.name} evaluated on {len(found.results)} platforms", flush=True)
    for note in notes:
        print(note)
    if not at_home:
        print(
            "the runs have no results of their home platform here, so nothing is judged; copy runs/*/evaluations to "
            "the machine of training, and run `make transfer` there"
        )
        return
    report = build_transfer(studies, labels)
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

"""`make export RUN=results/STUDY/runs/NAME [OUT=folder]`: a folder that transformers or `ra.exported` loads.

python -m scripts.export RUN_DIR [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.export")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(command_arguments(("OUT",), paths="RUN"))
    if len(given.runs) != 1:
        raise UserError("RUN names no single run; fix: make export RUN=results/STUDY/runs/NAME")
    export_environment()  # before torch is imported
    from study.evaluation.export import export_run

    exported = export_run(given.runs[0], given.out)
    print("; ".join(exported.facts))
    load = "transformers.GPT2LMHeadModel.from_pretrained" if exported.plain else "ra.exported.load_run"
    print(f"wrote {exported.folder}; load it with {load}({str(exported.folder)!r})")
    return 0


if __name__ == "__main__":
    run_command(main)

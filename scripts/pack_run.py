"""`make pack-run RUN=results/STUDY/runs/NAME`: the checklist of a run as a zip for `make check-config`.

python -m scripts.pack_run RUN_DIR [--out ZIP]

The zip holds what the run recorded, whatever this machine has. Two runs are compared without their folders.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from referee.numerics.setup.checklist_rows import Tables, write_checklist
from referee.numerics.setup.script_settings import add_setting
from runtime import run_record
from runtime.errors import UserError, run_command
from study.compare.loaded_studies import read_settings
from study.make_arguments import command_arguments
from study.study_settings import declared

USAGE = "fix: make pack-run RUN=results/STUDY/runs/NAME [OUT=a.zip]"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.pack_run")
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(command_arguments(("OUT",), paths="RUN"))
    if given.run is None or not given.run.is_dir():
        raise UserError(f"RUN={given.run or ''} is not a folder; {USAGE}")
    path = given.out or Path(f"{given.run.resolve().name}.zip")
    write_checklist(run_checklist(given.run), path)
    print(f"wrote {path}")
    return 0


def run_checklist(run_dir: Path) -> Tables:
    """Return what a run recorded. UserError where it has not recorded its machine, or a file is unreadable."""
    record = run_record.load_given(run_dir)
    environment, target, prints = record.environment, record.target, record.fingerprint
    if environment is None or target is None or prints is None:
        raise UserError(f"{run_dir} has not recorded its machine and data; fix: train it with `make`")
    settings: dict[str, set[str]] = {}
    recorded = {"VARIANT": record.variant, "PRECISION": target.dtype, "SEED": record.seed}
    for name, value in {**(read_settings(run_dir) or {}), **recorded}.items():
        if declared(name).entry != "design":
            add_setting(settings, name, value)
    machine = environment.to_json() | {"device": target.device}
    variables, code = machine.pop("variables"), machine.pop("code")
    packages = {"torch": target.torch, "numpy": machine.pop("numpy"), "triton": machine.pop("triton")}
    return {
        "machine": {name: "none" if value is None else str(value) for name, value in machine.items()},
        "environment": {name: str(value) for name, value in variables.items()},
        "packages": {name: version for name, version in packages.items() if version},
        "hyperparameters": {name: " and ".join(sorted(values)) for name, values in settings.items()},
        "data": {name: getattr(prints, name) for name in ("data", "tokenizer", "validation")},
        "weights": {"initial weights: values": f"digest {prints.initial_weights}"},
        "scripts": {name: f"sha256 {digest}" for name, digest in code.items()},
    }


if __name__ == "__main__":
    run_command(main)

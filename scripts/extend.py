"""`make extend FACTOR=2`: plan the finished runs of .config's study that many times as long; `make` continues them.

python -m scripts.extend FACTOR      extend the runs
python -m scripts.extend --undo 1    undo the last extension (`make extend UNDO=1`)
"""

from __future__ import annotations

import argparse

from configuration.arguments import command_arguments
from gpt2.config.dotconfig import read_text
from gpt2.system.errors import UserError, run_command
from scripts.study import CONFIG, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.extend")
    parser.add_argument("factor", nargs="?", default="")
    parser.add_argument("--undo", default="")
    arguments = parser.parse_args(command_arguments(("UNDO",), path="FACTOR"))
    if bool(arguments.factor) == bool(arguments.undo) or arguments.undo not in ("", "1"):
        raise UserError(
            "make extend needs one of FACTOR and UNDO=1; fix: `make extend FACTOR=2` plans runs twice as long, "
            "`make extend UNDO=1` restores the runs of before the last extension"
        )
    _, config, settings = load()
    from study.report.write import write_report
    from study.runner.extend import extend, parse_factor, undo

    if arguments.undo:
        messages = undo(settings)
    else:
        messages = extend(config, settings, read_text(CONFIG), parse_factor(arguments.factor))
    print(*messages, sep="\n")
    write_report(settings.results_dir / settings.name)
    return 0


if __name__ == "__main__":
    run_command(main)

"""`make extend FACTOR=2`: plan the finished runs of .config's study that many times as long; `make` runs them."""

from __future__ import annotations

import sys

from gpt2.system.errors import UserError, run_command
from scripts.study import CONFIG, load


def main() -> int:
    if len(sys.argv) != 2:
        raise UserError("FACTOR is missing; right: `make extend FACTOR=2` for runs twice as long")
    _, config, settings = load()
    from study.runner.extend import extend, parse_factor

    done = extend(config, settings, CONFIG.read_text(), parse_factor(sys.argv[1]))
    print(*done, sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)

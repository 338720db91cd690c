"""Run one function in a worker process and print its result as JSON. Started by bench.workers only.

    python -m bench.worker MODULE:FUNCTION '{"argument": value, ...}'

A function that returns a dict prints one line. A generator prints one line for each dict that it yields; it reads its
requests from standard input.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator

from gpt2.system.errors import run_command


def main() -> int:
    target, arguments = sys.argv[1:]
    module, _, function = target.partition(":")
    found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    for answer in found if isinstance(found, Iterator) else (found,):
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)

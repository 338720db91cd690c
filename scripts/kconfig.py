"""Write, edit and check .config: see `kconfig.commands`."""

import sys

from gpt2.system.errors import run_command
from kconfig.commands import main

if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))

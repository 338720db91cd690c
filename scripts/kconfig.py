"""Write, edit and check .config: see `study.kconfig_commands`."""

import sys

from runtime.errors import run_command
from study.kconfig_commands import main

if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))

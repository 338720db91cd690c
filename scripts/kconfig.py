"""Write, edit and check .config: see `configuration.commands`."""

import sys

from configuration.commands import main
from runtime.errors import run_command

if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))

"""Command-line entries, one a command; each is thin."""

import os
import sys

if os.name == "nt":  # before a module that Windows lacks is imported
    sys.exit(
        "error: Windows has no POSIX signals and file locks, which the trainer needs; "
        "fix: use WSL 2 (docs/systems.md)"
    )

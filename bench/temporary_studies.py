"""Configure studies in temporary folders, as `make defconfig-NAME` would, without running them."""

from __future__ import annotations

from pathlib import Path

from runtime.detected_hardware import detected_target_name
from study import kconfig_commands as commands
from study import kconfig_rules as rules
from study.study import Study


def configure_study(folder: Path, specification: str, **values: str) -> Study:
    """Configure `NAME+FRAGMENT...` with these symbols and results in `folder`. The user's .config stays unchanged."""
    tree = rules.load_kconfig(detected_target_name())
    values = {"RESULTS_DIR": str(folder / "results")} | values
    assignments = [f"CONFIG_{name}={value}" for name, value in values.items()]
    symbols = commands.configure(tree, commands.read_layers(specification), assignments)
    return Study(symbols, rules.render(tree))

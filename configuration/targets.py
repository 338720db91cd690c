"""Configure the study for a named target in memory; no file is written."""

from __future__ import annotations

from pathlib import Path

from configuration import commands, files, rules
from configuration.arguments import make_variables
from runtime.dotconfig import Entry, Symbols, parse_lines, read_text
from runtime.errors import UserError

STUDY = "gpt2-ra-ablation"


def symbols_for_target(name: str, base: str = "", makeflags: str | None = None) -> tuple[Symbols, str]:
    """Return the symbols of `make defconfig-gpt2-ra-ablation+NAME CONFIG_X=v` and their source in words.

    base: a .config whose settings are used instead of the defconfig's, with NAME as its target. makeflags: of make,
    with the CONFIG_X=v of its command line; default: MAKEFLAGS of the environment.
    """
    specification = f"{STUDY}+{name}"
    if "+" in name:
        raise UserError(f'TARGET={name} combines several targets; fix: TARGET="{name.replace("+", " ")}"')
    layers = commands.read_layers(specification)
    tree = rules.load_kconfig(name)
    variables = make_variables(makeflags)
    assignments = [f"{key}={value}" for key, value in variables.items() if key.startswith("CONFIG_")]
    if base:
        layers[0] = _without_target(Path(base))
    source = f"{base} with target {name}" if base else specification
    return commands.configure(tree, layers, assignments), " ".join([source, *assignments])


def _without_target(path: Path) -> dict[str, Entry]:
    """Return the settings of a .config that differ from the defaults, except its target."""
    if not path.exists():
        raise UserError(f"FROM={path} does not exist; fix: FROM=.config after `make defconfig-{STUDY}`")
    loaded = files.load_strictly(read_text(path), str(path))
    entries = parse_lines(rules.render(loaded.tree, minimal=True), str(path))
    return {
        key: entry for key, entry in entries.items() if not key.startswith("TARGET_") and key != "DETECTED"
    }

"""Configure the study for a named target in memory; no file is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gpt2.config.dotconfig import Entry, Symbols, parse_lines, read_symbols, read_text
from gpt2.system.errors import UserError
from kconfig import commands, files, rules
from kconfig.arguments import make_variables, parse_assignments

STUDY = "gpt2-ra-ablation"


def symbols_for_target(name: str, base: str = "", makeflags: str | None = None) -> tuple[Symbols, str]:
    """The symbols of `make defconfig-gpt2-ra-ablation+NAME CONFIG_X=v` and that specification.

    base: a .config whose settings are used instead of the defconfig's, with NAME as its target. makeflags: of make,
    with the CONFIG_X=v of its command line; default: MAKEFLAGS of the environment.
    """
    specification = f"{STUDY}+{name}"
    defconfig, fragment, *others = commands.find_files(specification)
    if others:
        raise UserError(f'TARGET={name} combines several targets; fix: TARGET="{name.replace("+", " ")}"')
    tree = rules.load_kconfig(name)
    variables = make_variables(os.environ.get("MAKEFLAGS", "") if makeflags is None else makeflags)
    assignments = [f"{key}={value}" for key, value in variables.items() if key.startswith("CONFIG_")]
    layers = [
        _without_target(Path(base))
        if base
        else parse_lines(read_text(defconfig), commands.display_name(defconfig)),
        parse_lines(read_text(fragment), commands.display_name(fragment)),
        parse_assignments(tree, assignments),
    ]
    entries = rules.merge(tree, layers)
    rules.check_tree(tree, {entry.name: entry.where for entry in entries})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        path.write_text(rules.render(tree), encoding="utf-8")
        symbols = read_symbols(path)
    return symbols, " ".join([f"{base} with target {name}" if base else specification, *assignments])


def _without_target(path: Path) -> dict[str, Entry]:
    """The settings of a .config that differ from the defaults, except its target."""
    if not path.exists():
        raise UserError(f"FROM={path} does not exist; fix: FROM=.config after `make defconfig-{STUDY}`")
    loaded = files.load_strictly(read_text(path), str(path))
    entries = parse_lines(rules.render(loaded.tree, minimal=True), str(path))
    return {
        key: entry for key, entry in entries.items() if not key.startswith("TARGET_") and key != "DETECTED"
    }

"""Check every Kconfig assignment before and after it is applied.

kconfiglib ignores an unknown symbol, a value out of range, an unmet dependency and a choice's second member. Here
each raises a ConfigError with the location, the symbol, the value and the fix.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.dotconfig import INTEGER, ConfigError, Entry, Symbols, parse_lines
from runtime.errors import disk_full
from runtime.files import DamagedFileError, read_bytes, write_bytes
from runtime.settings import Config, detected
from study.study_settings import StudySettings

try:
    import kconfiglib
except ImportError:  # load_kconfig explains it; `make help` needs none
    kconfiglib = None

ROOT = Path(__file__).resolve().parent.parent
HEADER = (
    "# Written by `make`: edit it with `make menuconfig`, replace it with `make defconfig-NAME CONFIG_X=v`\n"
)
Kconfig = Any  # kconfiglib has no types
Symbol = Any


def load_kconfig(detected: str) -> Kconfig:
    """Load the tree of Kconfig files for the hardware `detected`."""
    if not re.fullmatch(r"[a-z0-9-]+", detected):
        raise ConfigError(f'invalid hardware name "{detected}"; fix: RA_DETECTED=cpu or RA_DETECTED=a100-40g')
    if kconfiglib is None:
        raise ConfigError("this Python lacks kconfiglib; fix: install it, or run make without PYTHON=")
    with kconfig_environment(detected):
        tree = kconfiglib.Kconfig("Kconfig", warn_to_stderr=False)
    if tree.warnings:
        raise ConfigError(f"error in the Kconfig files: {' '.join(tree.warnings[0].split())}")
    return tree


@contextlib.contextmanager
def kconfig_environment(detected: str) -> Iterator[None]:
    """Set the environment of kconfiglib to this repository, and remove the variables of other projects."""
    saved = dict(os.environ)
    for name in ("CONFIG_", *(name for name in saved if name.startswith("KCONFIG_"))):
        os.environ.pop(name, None)
    os.environ.update(srctree=str(ROOT), RA_DETECTED=detected)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def find_symbol(tree: Kconfig, entry: Entry) -> Symbol:
    """Return the symbol of an entry. ConfigError for an unknown one suggests a close match."""
    symbol = tree.syms.get(entry.name)
    if symbol is not None and symbol.nodes:
        return symbol
    known = [symbol.name for symbol in tree.unique_defined_syms if has_prompt(symbol)]
    near = difflib.get_close_matches(entry.name.upper(), known, n=1)
    hint = f"fix: did you mean CONFIG_{near[0]}?" if near else "fix: make menuconfig (it shows all symbols)"
    raise ConfigError(f"{entry.where}: {entry} sets an unknown symbol; {hint}")


def has_prompt(symbol: Symbol) -> bool:
    """Return whether users can set the symbol. Symbols without a prompt follow from others."""
    return any(node.prompt for node in symbol.nodes)


def type_name(symbol: Symbol) -> str:
    return str(kconfiglib.TYPE_TO_STR[symbol.orig_type])


def check_type(symbol: Symbol, entry: Entry) -> None:
    """Raise ConfigError where the value does not fit the symbol's type."""
    kind = type_name(symbol)
    if kind == "bool" and (entry.quoted or entry.value not in ("y", "n")):
        raise ConfigError(
            f"{entry.where}: {entry} is neither y nor n; fix: CONFIG_{entry.name}=y or =n, unquoted"
        )
    if kind == "string" and not entry.quoted:
        raise ConfigError(
            f'{entry.where}: {entry} is text and needs double quotes; fix: CONFIG_{entry.name}="{entry.value}"'
        )
    if kind == "int":
        bounds = [
            (int(low.str_value), int(high.str_value))
            for low, high, condition in symbol.ranges
            if kconfiglib.expr_value(condition)
        ]
        low, high = bounds[0] if bounds else (-math.inf, math.inf)
        whole = not entry.quoted and INTEGER.fullmatch(entry.value)
        if not whole or not low <= int(entry.value) <= high:
            problem = "is out of range" if whole else "is not a whole number"
            fix = f"; fix: use {low} to {high}, such as {symbol.str_value or low}" if bounds else ""
            raise ConfigError(f"{entry.where}: {entry} {problem}{fix}")


def check_entries(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """Raise ConfigError for the first entry that is invalid by itself or contradicts another one."""
    entries = list(entries)
    for entry in entries:
        symbol = find_symbol(tree, entry)
        if not has_prompt(symbol):
            raise ConfigError(f"{entry.where}: {entry} cannot be set; {_instead(entry.name)}")
        check_type(symbol, entry)
    check_choices(tree, entries)


def apply_entries(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """Set these values and no others. ConfigError for the first that has no effect.

    entries: checked, each symbol once.
    """
    entries = list(entries)
    set_values(tree, entries)
    for entry in entries:
        if tree.syms[entry.name].str_value != entry.value:
            raise ConfigError(explain_rejection(tree.syms[entry.name], entry))


def merge(tree: Kconfig, layers: Sequence[Mapping[str, Entry]]) -> list[Entry]:
    """Merge a defconfig, its fragments and the command line; later layers win.

    Fragments and command line may replace the defconfig's member of a choice, but must not name two members. An
    entry whose dependency a later layer removes is dropped: HELLASWAG=n drops the defconfig's HELLASWAG_LIMIT.
    """
    for layer in layers:
        check_entries(tree, layer.values())
    check_choices(tree, [entry for layer in layers[1:] for entry in layer.values()])
    merged: dict[str, Entry] = {}
    for layer in layers:
        visible = {name for name in merged if tree.syms[name].visibility}
        chosen = {tree.syms[entry.name].choice for entry in layer.values() if entry.value == "y"} - {None}
        below = {name: entry for name, entry in merged.items() if tree.syms[name].choice not in chosen}
        merged = {**below, **layer}
        set_values(tree, merged.values())
        hidden = [name for name in visible & merged.keys() - layer.keys() if not tree.syms[name].visibility]
        merged = {name: entry for name, entry in merged.items() if name not in hidden}
    apply_entries(tree, merged.values())
    return list(merged.values())


def set_values(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """Set these values and no others, without a check of their effect."""
    tree.unset_values()
    for entry in entries:
        tree.syms[entry.name].set_value(entry.value)


def _instead(name: str) -> str:
    if name == "DETECTED":
        return "fix: add a fragment such as +a100-40g, or set RA_DETECTED=NAME before make"
    return "fix: remove it; its value is computed from CONFIG_TARGET_* and CONFIG_DETECTED"


def check_choices(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """Raise ConfigError where two members of one choice are y."""
    chosen: dict[Any, Entry] = {}
    for entry in entries:
        choice = tree.syms[entry.name].choice
        if choice is None or entry.value != "y":
            continue
        if choice in chosen:
            first = chosen[choice]
            raise ConfigError(
                f"{entry.where}: {entry} excludes {first} ({first.where}): the choice "
                f'"{choice.nodes[0].prompt[0]}" has one value; fix: remove one'
            )
        chosen[choice] = entry


def explain_rejection(symbol: Symbol, entry: Entry) -> str:
    """Explain why a value has no effect. ConfigError for one out of range."""
    if not symbol.visibility:
        needed = requirements(symbol)
        return f"{entry.where}: {entry} needs {needed}; fix: set {needed}, or remove {entry}"
    if symbol.choice is not None:
        others = ", ".join(f"CONFIG_{member.name}=y" for member in symbol.choice.syms if member is not symbol)
        return f"{entry.where}: {entry} deselects the only selected member of its choice; fix: set one of {others}"
    check_type(symbol, entry)  # with the other entries set, a range that depends on them is known
    return f"{entry.where}: {entry} has no effect; the value is {symbol.str_value}; fix: remove it"


def requirements(symbol: Symbol) -> str:
    """Return the conditions of the symbol's prompt, without the choice that contains it."""
    parts = kconfiglib.split_expr(symbol.nodes[0].prompt[1], kconfiglib.AND)
    return " and ".join(
        kconfiglib.expr_str(part, _with_prefix) for part in parts if not isinstance(part, kconfiglib.Choice)
    )


def _with_prefix(item: Any) -> str:
    return f"CONFIG_{item.name}" if getattr(item, "nodes", None) else f'"{getattr(item, "name", item)}"'


def render(tree: Kconfig, minimal: bool = False, header: str = HEADER) -> str:
    """Return the text of .config, or with `minimal` the text of its shortest defconfig."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        if minimal:
            tree.write_min_config(str(path), header=header)
        else:
            tree.write_config(str(path), header=header, save_old=False)
        return path.read_text(encoding="utf-8")


def check_settings(symbols: Symbols) -> Config:
    """Check what Kconfig cannot: floats, names, and values that contradict each other."""
    config = Config.from_symbols(symbols)
    StudySettings.from_symbols(symbols)
    return config


def check_tree(tree: Kconfig, origins: Mapping[str, str]) -> Symbols:
    """Return the tree's checked symbols. Errors point to `origins`, and to "default" for other symbols."""
    entries = parse_lines(render(tree), ".config")
    symbols = Symbols(".config", entries, {name: origins.get(name, "default") for name in entries})
    check_settings(symbols)
    return symbols


# Load a .config strictly or update it; replace it atomically and save the previous one as .config.old.


@dataclass(frozen=True)
class LoadedConfig:
    """A valid .config. notes: the changes that olddefconfig made."""

    tree: Kconfig
    config: Config
    notes: tuple[str, ...]


def load_strictly(text: str, label: str) -> LoadedConfig:
    """Load a complete and consistent .config. ConfigError names label:line of the first fault."""
    entries = parse_lines(text, label)
    if "DETECTED" not in entries:
        raise ConfigError(f"{label}: CONFIG_DETECTED is missing; fix: make olddefconfig")
    tree = load_kconfig(detected(Symbols(label, entries)))
    settable = [entry for entry in entries.values() if has_prompt(find_symbol(tree, entry))]
    check_entries(tree, settable)
    apply_entries(tree, settable)
    expected = parse_lines(render(tree), label)
    for name, entry in expected.items():
        if name not in entries:
            raise ConfigError(f"{label}: CONFIG_{name} is missing; fix: make olddefconfig (it adds {entry})")
        if str(entries[name]) != str(entry):
            raise ConfigError(
                f"{entries[name].where}: {entries[name]} should be {entry}, which follows from other symbols; "
                "fix: make olddefconfig"
            )
    for name, entry in entries.items():
        if name not in expected and entry.value != "n":
            raise ConfigError(
                f"{entry.where}: {entry} does not follow from the other symbols; fix: make olddefconfig"
            )
    return LoadedConfig(tree, check_settings(Symbols(label, entries)), ())


def load_leniently(text: str, label: str, detect: str) -> LoadedConfig:
    """Update a .config: add missing symbols, derive those without a prompt, drop those with unmet dependencies.

    Unknown symbols and bad values raise ConfigError. detect: the hardware where the .config names none.
    """
    entries = parse_lines(text, label)
    tree = load_kconfig(detected(Symbols(label, entries)) if "DETECTED" in entries else detect)
    settable = {entry.name: entry for entry in entries.values() if has_prompt(find_symbol(tree, entry))}
    check_entries(tree, settable.values())
    set_values(tree, settable.values())
    notes = []
    for name, entry in settable.items():
        symbol = tree.syms[name]
        if symbol.str_value == entry.value:
            continue
        if symbol.visibility:
            raise ConfigError(explain_rejection(symbol, entry))
        notes.append(f"dropped {entry}, which needs {requirements(symbol)}")
    after = parse_lines(render(tree), label)
    notes += [f"added {entry}" for name, entry in after.items() if name not in entries]
    notes += [
        f"corrected {after.get(name, f'CONFIG_{name}=n')}, was {entry}"
        for name, entry in entries.items()
        if name not in settable and str(after.get(name)) != str(entry)
    ]
    origins = {name: entry.where for name, entry in settable.items()}
    return LoadedConfig(tree, Config.from_symbols(check_tree(tree, origins)), tuple(notes))


def back_up(path: Path, text: str) -> str:
    """Save .config, valid or not, as .config.old before `text` replaces it. Returns the words for the user."""
    if not path.exists():
        return ""
    try:
        before = read_bytes(path)
    except DamagedFileError as error:
        raise ConfigError(f"{error}; fix: move it away") from None
    if before == text.encode():
        return ", unchanged"
    old = path.with_name(f"{path.name}.old")
    replace_file(old, before)
    return f"; the previous one is {old.name}"


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file, so that it is never half written. ConfigError where it cannot be written."""
    try:
        write_bytes(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        if disk_full(error):  # run_command names the fix
            raise
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

"""Kconfig without its silences: every assignment is checked before and after it is made.

Kconfig's library passes over an unknown symbol, a value out of range, an unmet dependency or a choice's losing
member; here each is a ConfigError naming where it stands, the symbol, the value, and what would be right.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2.config.config import Config
from gpt2.config.dotconfig import INTEGER, ConfigError, Entry, Symbols, parse_lines, quote
from ra.settings import AlternationSettings
from study.runner.settings import StudySettings

ROOT = Path(__file__).resolve().parent.parent
HEADER = (
    "# Written by `make`: change it with `make menuconfig`, or anew with `make defconfig-NAME CONFIG_X=v`\n"
)
Kconfig = Any  # kconfiglib has no types
Symbol = Any


def load_kconfig(detected: str) -> Kconfig:
    """The tree of Kconfig files, for a machine on which `detected` was seen."""
    if not re.fullmatch(r"[a-z0-9-]+", detected):
        raise ConfigError(f'the detected hardware "{detected}" is no name; right: such as cpu or a100-40g')
    try:
        import kconfiglib
    except ImportError:
        raise ConfigError("this interpreter has no kconfiglib; `make` sets up one that has it") from None
    with kconfig_environment(detected):
        tree = kconfiglib.Kconfig("Kconfig", warn_to_stderr=False)
    if tree.warnings:
        raise ConfigError(f"the Kconfig files are at fault: {' '.join(tree.warnings[0].split())}")
    return tree


@contextlib.contextmanager
def kconfig_environment(detected: str) -> Iterator[None]:
    """The environment that Kconfig's library is to see: this repository's, whatever else the user builds."""
    saved = dict(os.environ)
    for name in ("CONFIG_", *(name for name in saved if name.startswith("KCONFIG_"))):
        os.environ.pop(name, None)
    os.environ.update(srctree=str(ROOT), RA_DETECTED=detected)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def find(tree: Kconfig, entry: Entry) -> Symbol:
    """The symbol of an entry; ConfigError with a close match where there is none."""
    symbol = tree.syms.get(entry.name)
    if symbol is not None and symbol.nodes:
        return symbol
    known = [symbol.name for symbol in tree.unique_defined_syms if has_prompt(symbol)]
    near = difflib.get_close_matches(entry.name.upper(), known, n=1)
    hint = f"did you mean CONFIG_{near[0]}?" if near else "`make menuconfig` shows all there are"
    raise ConfigError(f"{entry.where}: {entry} sets an unknown symbol; {hint}")


def has_prompt(symbol: Symbol) -> bool:
    """Whether users may set the symbol; the others are worked out."""
    return any(node.prompt for node in symbol.nodes)


def type_name(symbol: Symbol) -> str:
    import kconfiglib

    return str(kconfiglib.TYPE_TO_STR[symbol.orig_type])


def check_type(symbol: Symbol, entry: Entry) -> None:
    """ConfigError where the value is not written as the symbol's type wants it."""
    kind = type_name(symbol)
    if kind == "bool" and (entry.quoted or entry.value not in ("y", "n")):
        raise ConfigError(
            f"{entry.where}: {entry} is neither y nor n; right: CONFIG_{entry.name}=y or =n, unquoted"
        )
    if kind == "string" and not entry.quoted:
        raise ConfigError(
            f'{entry.where}: {entry} is text and needs double quotes; right: CONFIG_{entry.name}="{entry.value}"'
        )
    if kind == "int":
        if entry.quoted or not INTEGER.fullmatch(entry.value):
            raise ConfigError(
                f"{entry.where}: {entry} is not a whole number{_range_words(symbol, '; right: ')}"
            )
        check_range(symbol, entry)


def check_range(symbol: Symbol, entry: Entry) -> None:
    import kconfiglib

    for low, high, condition in symbol.ranges:
        if kconfiglib.expr_value(condition):
            if not int(low.str_value) <= int(entry.value) <= int(high.str_value):
                raise ConfigError(
                    f"{entry.where}: {entry} is out of range{_range_words(symbol, '; right: ')}"
                )
            return


def _range_words(symbol: Symbol, lead: str) -> str:
    import kconfiglib

    for low, high, condition in symbol.ranges:
        if kconfiglib.expr_value(condition):
            return f"{lead}{low.str_value} to {high.str_value}, such as {symbol.str_value or low.str_value}"
    return ""


def check_entries(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """ConfigError for the first entry that could not be right whatever the others say, or contradicts another."""
    entries = list(entries)
    for entry in entries:
        symbol = find(tree, entry)
        if not has_prompt(symbol):
            raise ConfigError(
                f"{entry.where}: {entry} cannot be set: it is worked out; {_instead(entry.name)}"
            )
        check_type(symbol, entry)
    check_choices(tree, entries)


def enforce(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """Give the symbols these values and no others; ConfigError for the first that does not come into force.

    The entries have been checked, and hold each symbol once.
    """
    entries = list(entries)
    set_values(tree, entries)
    for entry in entries:
        if tree.syms[entry.name].str_value != entry.value:
            raise ConfigError(why_not(tree.syms[entry.name], entry))


def merge(tree: Kconfig, layers: Sequence[Mapping[str, Entry]]) -> list[Entry]:
    """The entries of a defconfig, its fragments and the command line, in force together; later ones win.

    Within one command two members of one choice contradict each other: only the defconfig's own is overridden. What
    a later layer overrides takes along what depended on it: HELLASWAG=n also drops the defconfig's HELLASWAG_LIMIT.
    """
    for layer in layers:
        check_entries(tree, layer.values())
    check_choices(tree, [entry for layer in layers[1:] for entry in layer.values()])
    merged: dict[str, Entry] = {}
    for layer in layers:
        seen = {name for name in merged if tree.syms[name].visibility}
        chosen = {tree.syms[entry.name].choice for entry in layer.values() if entry.value == "y"} - {None}
        kept = {name: entry for name, entry in merged.items() if tree.syms[name].choice not in chosen}
        merged = {**kept, **layer}
        set_values(tree, merged.values())
        hidden = [name for name in seen & merged.keys() - layer.keys() if not tree.syms[name].visibility]
        merged = {name: entry for name, entry in merged.items() if name not in hidden}
    enforce(tree, merged.values())
    return list(merged.values())


def set_values(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """The tree with these values and no others; nothing is said of those that do not come into force."""
    tree.unset_values()
    for entry in entries:
        tree.syms[entry.name].set_value(entry.value)


def _instead(name: str) -> str:
    if name == "DETECTED":
        return "RA_DETECTED=NAME before make plans for another machine, and so does a fragment: +a100-40g"
    return "it follows CONFIG_TARGET_* and what was detected; leave it out"


def check_choices(tree: Kconfig, entries: Iterable[Entry]) -> None:
    """ConfigError where two members of one choice are y, naming both."""
    chosen: dict[Any, Entry] = {}
    for entry in entries:
        choice = tree.syms[entry.name].choice
        if choice is None or entry.value != "y":
            continue
        if choice in chosen:
            first = chosen[choice]
            raise ConfigError(
                f"{entry.where}: {entry} excludes {first} ({first.where}): they are one choice, "
                f'"{choice.nodes[0].prompt[0]}"; keep one'
            )
        chosen[choice] = entry


def why_not(symbol: Symbol, entry: Entry) -> str:
    """Why a value that was given to a symbol is not in force."""
    import kconfiglib

    if not symbol.visibility:
        items = [item for part in _conditions(symbol) for item in kconfiglib.expr_items(part)]
        now = ", ".join(
            f"CONFIG_{item.name} is {_shown(item)}" for item in items if getattr(item, "nodes", None)
        )
        return f"{entry.where}: {entry} needs {needs(symbol)}, but {now}; change that, or drop CONFIG_{entry.name}"
    if symbol.choice is not None:
        others = ", ".join(f"CONFIG_{member.name}=y" for member in symbol.choice.syms if member is not symbol)
        return f"{entry.where}: {entry} leaves its choice empty; right: name the one you want, of {others}"
    return f"{entry.where}: {entry} does not come into force, the value stays {symbol.str_value}"


def _conditions(symbol: Symbol) -> list[Any]:
    """What must hold for users to set the symbol, the choice that it is in left out."""
    import kconfiglib

    parts = kconfiglib.split_expr(symbol.nodes[0].prompt[1], kconfiglib.AND)
    return [part for part in parts if not isinstance(part, kconfiglib.Choice)]


def needs(symbol: Symbol) -> str:
    import kconfiglib

    return " and ".join(kconfiglib.expr_str(part, _with_prefix) for part in _conditions(symbol))


def _shown(symbol: Symbol) -> str:
    return quote(symbol.str_value) if type_name(symbol) == "string" else str(symbol.str_value)


def _with_prefix(item: Any) -> str:
    return f"CONFIG_{item.name}" if getattr(item, "nodes", None) else f'"{getattr(item, "name", item)}"'


def render(tree: Kconfig, minimal: bool = False, header: str = HEADER) -> str:
    """The text of .config, or of the defconfig that gives it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        if minimal:
            tree.write_min_config(str(path), header=header)
        else:
            tree.write_config(str(path), header=header, save_old=False)
        return path.read_text(encoding="utf-8")


def check_settings(symbols: Symbols) -> Config:
    """The checks that Kconfig cannot make: floats, names, and values that do not go together."""
    config = Config.from_symbols(symbols)
    AlternationSettings.from_symbols(symbols)
    StudySettings.from_symbols(symbols)
    return config


def check_tree(tree: Kconfig, origins: Mapping[str, str]) -> Config:
    """`check_settings` of what `render` gives; errors point to `origins`, and to "default" for the rest."""
    entries = parse_lines(render(tree), ".config")
    return check_settings(
        Symbols(".config", entries, {name: origins.get(name, "default") for name in entries})
    )

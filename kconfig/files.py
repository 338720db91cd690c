"""A .config as a file: loaded strictly or brought up to date, replaced atomically, the one before kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt2.config.config import Config, detected
from gpt2.config.dotconfig import ConfigError, Entry, Symbols, parse_lines, read_text
from gpt2.system.errors import UserError
from kconfig.rules import (
    Kconfig,
    check_entries,
    check_settings,
    check_tree,
    enforce,
    find,
    has_prompt,
    load_kconfig,
    needs,
    render,
    set_values,
    why_not,
)


@dataclass(frozen=True)
class Loaded:
    """A .config in force. notes: what olddefconfig had to bring up to date."""

    tree: Kconfig
    entries: dict[str, Entry]
    config: Config
    notes: tuple[str, ...]


def load_strictly(text: str, label: str) -> Loaded:
    """A complete and consistent .config; ConfigError names label:line of the first thing that is neither."""
    entries = parse_lines(text, label)
    if "DETECTED" not in entries:
        raise ConfigError(f"{label}: CONFIG_DETECTED is missing; `make olddefconfig` adds what is missing")
    tree = load_kconfig(_detected(entries, label))
    settable = [entry for entry in entries.values() if has_prompt(find(tree, entry))]
    check_entries(tree, settable)
    enforce(tree, settable)
    expected = parse_lines(render(tree), label)
    for name, entry in expected.items():
        if name not in entries:
            raise ConfigError(f"{label}: CONFIG_{name} is missing; `make olddefconfig` adds it, as {entry}")
        if str(entries[name]) != str(entry):
            raise ConfigError(
                f"{entries[name].where}: {entries[name]} should be {entry}, which is worked out from the other "
                "symbols; `make olddefconfig` sets it right"
            )
    for name, entry in entries.items():
        if name not in expected and entry.value != "n":
            if has_prompt(tree.syms[name]):
                raise ConfigError(why_not(tree.syms[name], entry))
            raise ConfigError(
                f"{entry.where}: {entry} should not be there: it is worked out from the other symbols; "
                "`make olddefconfig` sets it right"
            )
    return Loaded(tree, entries, check_settings(Symbols(label, entries)), ())


def load_leniently(text: str, label: str, detect: str) -> Loaded:
    """A .config brought up to date: missing symbols get defaults, worked-out ones are worked out, those whose
    dependencies are no longer met are dropped. Unknown symbols and bad values stay errors.

    `detect` is the hardware to assume where the .config does not say.
    """
    entries = parse_lines(text, label)
    tree = load_kconfig(_detected(entries, label) if "DETECTED" in entries else detect)
    settable = {entry.name: entry for entry in entries.values() if has_prompt(find(tree, entry))}
    check_entries(tree, settable.values())
    set_values(tree, settable.values())
    notes = []
    for name, entry in settable.items():
        symbol = tree.syms[name]
        if symbol.str_value == entry.value:
            continue
        if symbol.visibility:
            raise ConfigError(why_not(symbol, entry))
        notes.append(f"dropped {entry}, which needs {needs(symbol)}")
    after = parse_lines(render(tree), label)
    notes += [f"added {entry}" for name, entry in after.items() if name not in entries]
    notes += [
        f"set right {after.get(name, f'CONFIG_{name}=n')}, was {entry}"
        for name, entry in entries.items()
        if name not in settable and str(after.get(name)) != str(entry)
    ]
    origins = {name: entry.where for name, entry in settable.items()}
    return Loaded(tree, after, check_tree(tree, origins), tuple(notes))


def _detected(entries: Mapping[str, Entry], label: str) -> str:
    return detected(Symbols(label, entries))


def back_up(path: Path, text: str) -> str:
    """Save a valid .config that is about to be replaced by other text; what to say of it."""
    if not path.exists():
        return ""
    try:
        before = read_text(path)
        load_strictly(before, str(path))
    except UserError as error:
        return f"; the one before was not valid and is not kept ({error})"
    if before == text:
        return ", which is the same as before"
    write_atomically(path.with_name(f"{path.name}.old"), before)
    return f"; the one before is {path.name}.old"


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name, fsync, rename: the file is the old one or the new one, whatever happens."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

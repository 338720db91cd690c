"""Load a .config strictly or update it; replace it atomically and save the previous one as .config.old."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.dotconfig import ConfigError, Symbols, parse_lines
from runtime.errors import disk_full
from runtime.files import DamagedFileError, read_bytes, write_bytes
from runtime.settings import Config, detected
from study import kconfig_rules as rules


@dataclass(frozen=True)
class LoadedConfig:
    """A valid .config. notes: the changes that olddefconfig made."""

    tree: rules.Kconfig
    config: Config
    notes: tuple[str, ...]


def load_strictly(text: str, label: str) -> LoadedConfig:
    """Load a complete and consistent .config. ConfigError names label:line of the first fault."""
    entries = parse_lines(text, label)
    if "DETECTED" not in entries:
        raise ConfigError(f"{label}: CONFIG_DETECTED is missing; fix: make olddefconfig")
    tree = rules.load_kconfig(detected(Symbols(label, entries)))
    settable = [entry for entry in entries.values() if rules.has_prompt(rules.find_symbol(tree, entry))]
    rules.check_entries(tree, settable)
    rules.apply_entries(tree, settable)
    expected = parse_lines(rules.render(tree), label)
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
    return LoadedConfig(tree, rules.check_settings(Symbols(label, entries)), ())


def load_leniently(text: str, label: str, detect: str) -> LoadedConfig:
    """Update a .config: add missing symbols, derive those without a prompt, drop those with unmet dependencies.

    Unknown symbols and bad values raise ConfigError. detect: the hardware where the .config names none.
    """
    entries = parse_lines(text, label)
    tree = rules.load_kconfig(detected(Symbols(label, entries)) if "DETECTED" in entries else detect)
    settable = {
        entry.name: entry for entry in entries.values() if rules.has_prompt(rules.find_symbol(tree, entry))
    }
    rules.check_entries(tree, settable.values())
    rules.set_values(tree, settable.values())
    notes = []
    for name, entry in settable.items():
        symbol = tree.syms[name]
        if symbol.str_value == entry.value:
            continue
        if symbol.visibility:
            raise ConfigError(rules.explain_rejection(symbol, entry))
        notes.append(f"dropped {entry}, which needs {rules.requirements(symbol)}")
    after = parse_lines(rules.render(tree), label)
    notes += [f"added {entry}" for name, entry in after.items() if name not in entries]
    notes += [
        f"corrected {after.get(name, f'CONFIG_{name}=n')}, was {entry}"
        for name, entry in entries.items()
        if name not in settable and str(after.get(name)) != str(entry)
    ]
    origins = {name: entry.where for name, entry in settable.items()}
    return LoadedConfig(tree, Config.from_symbols(rules.check_tree(tree, origins)), tuple(notes))


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

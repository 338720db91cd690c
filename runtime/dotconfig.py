"""Parse .config and defconfig files strictly, and read their symbols by type.

Standard library only: a run needs no kconfiglib. No shell interprets a value.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime import files
from runtime.errors import UserError
from runtime.files import DamagedFileError

SIZE_LIMIT = 2**20  # bytes of a configuration
SET = re.compile(r"CONFIG_([A-Za-z0-9_]+)=(.*)")
UNSET = re.compile(r"# CONFIG_([A-Za-z0-9_]+) is not set")
QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
)  # and ends of lines, and bytes that are not UTF-8


class ConfigError(UserError, ValueError):
    """The configuration is invalid. The message names file, line, symbol and value."""


@dataclass(frozen=True)
class Entry:
    """One assignment: `CONFIG_name=value`; `# CONFIG_name is not set` counts as the value n.

    value: without quotes and escapes. where: "file:line", or "command line".
    """

    name: str
    value: str
    quoted: bool
    where: str

    def __str__(self) -> str:
        return f"CONFIG_{self.name}={quote(self.value) if self.quoted else self.value}"


def quote(text: str) -> str:
    """Return `text` as a string literal of .config."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def split_words(text: str) -> tuple[str, ...]:
    """Split at spaces, with quotes as in a shell: 'my texts/*.txt' is one word. A lone quote is part of its word."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return tuple(text.split())


def parse_value(name: str, literal: str, where: str) -> Entry:
    """Parse `CONFIG_name=literal`. ConfigError for a literal that is neither a word nor a quoted string."""
    if CONTROL.search(literal):
        raise ConfigError(
            f"{where}: CONFIG_{name} holds a control character ({literal!r}); fix: use printable text"
        )
    if match := QUOTED.fullmatch(literal):
        return Entry(name, re.sub(r"\\(.)", r"\1", match[1]), True, where)
    if not literal or re.search(r'["\s]', literal):
        raise ConfigError(
            f"{where}: CONFIG_{name}={literal} is malformed; fix: use y, n, a whole number, or text in double quotes "
            '(inside them \\" for " and \\\\ for \\)'
        )
    return Entry(name, literal, False, where)


def parse_lines(text: str, label: str) -> dict[str, Entry]:
    """Map symbol names to the entries of a .config or defconfig. ConfigError names `label`:line.

    Lines are `CONFIG_X=value`, `# CONFIG_X is not set`, other comments, or empty.
    """
    entries: dict[str, Entry] = {}
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{label}:{number}"
        line = line.rstrip()
        if match := SET.fullmatch(line):
            entry = parse_value(match[1], match[2], where)
        elif match := UNSET.fullmatch(line):
            entry = Entry(match[1], "n", False, where)
        elif not line or (line.startswith("#") and not re.match(r"#\s*CONFIG_\w+ is not", line)):
            continue
        else:
            raise ConfigError(
                f"{where}: malformed line `{line}`; fix: CONFIG_NAME=value (no spaces around =), "
                "`# CONFIG_NAME is not set`, or a comment on a separate line"
            )
        if entry.name in entries:
            first = entries[entry.name]
            raise ConfigError(
                f"{where}: {entry} is already set, as {first} at {first.where}; fix: remove one of the lines"
            )
        entries[entry.name] = entry
    return entries


def read_text(path: Path) -> str:
    """Read a configuration file. ConfigError where it is absent or damaged."""
    try:
        return files.read_text(path, SIZE_LIMIT)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; fix: make defconfig-gpt2-ra-ablation (it writes .config)"
        ) from None
    except DamagedFileError as error:
        raise ConfigError(
            f"{error}; fix: restore it, or move it away and run `make defconfig-NAME`"
        ) from None


class Symbols:
    """Read a parsed .config by type. Names have no CONFIG_ prefix. A wrong type raises ConfigError.

    origins: where the user set a symbol (a defconfig's line, the command line). Errors point there instead of at
    the generated file.
    """

    def __init__(
        self, label: str, entries: Mapping[str, Entry], origins: Mapping[str, str] | None = None
    ) -> None:
        self.label = label
        self.entries = dict(entries)
        self.origins = dict(origins or {})

    @property
    def sha256(self) -> str:
        """Hash the values without comments, order and blank lines."""
        lines = sorted(str(entry) for entry in self.entries.values())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def error(self, name: str, problem: str) -> ConfigError:
        """Build the error `where: CONFIG_name=value problem`."""
        entry = self.entries[name]
        return ConfigError(f"{self.origins.get(name, entry.where)}: {entry} {problem}")

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise ConfigError(
                f"{self.label}: CONFIG_{name} is missing; fix: make olddefconfig (it adds the default)"
            )
        return self.entries[name]

    def text(self, name: str) -> str:
        """Return a string value, which .config quotes."""
        entry = self._entry(name)
        if not entry.quoted:
            raise self.error(name, f'is not in double quotes; fix: CONFIG_{name}="{entry.value}"')
        return entry.value

    def folder(self, name: str) -> Path:
        """Return the folder that a string symbol names."""
        if not self.text(name).strip():
            raise self.error(name, "names no folder; fix: use a path, relative to the repository or absolute")
        return Path(self.text(name))

    def integer(self, name: str) -> int:
        """Return a whole number of 0 or more."""
        entry = self._entry(name)
        if entry.quoted or not INTEGER.fullmatch(entry.value) or entry.value.startswith("-"):
            raise self.error(name, "is not a whole number; fix: use 0 or more, unquoted")
        return int(entry.value)

    def flag(self, name: str) -> bool:
        entry = self._entry(name)
        if entry.quoted or entry.value not in ("y", "n"):
            raise self.error(name, "is neither y nor n; fix: use y or n, unquoted")
        return entry.value == "y"

    def is_on(self, name: str) -> bool:
        """Return whether a flag is y. Kconfig leaves out a flag without a prompt that is n."""
        return name in self.entries and self.flag(name)

    def number(self, name: str, interval: str) -> float:
        """Return a finite float within the interval, such as "[0, 1)", from a string symbol."""
        value = number_in(interval, self.text(name))
        if value is None:
            raise self.error(
                name, f"is not a number in {interval}; fix: use a decimal in {interval}, such as 0.1 or 6e-4"
            )
        return value

    def choice(self, members: Iterable[str]) -> str:
        """Return the one symbol among `members` that is y."""
        members = list(members)
        chosen = [name for name in members if name in self.entries and self.flag(name)]
        if not chosen:
            names = ", ".join(f"CONFIG_{name}" for name in members)
            raise ConfigError(
                f"{self.label}: none of {names} is y; fix: make olddefconfig (it selects the default)"
            )
        if len(chosen) > 1:
            raise self.error(chosen[1], f"and CONFIG_{chosen[0]}=y exclude each other; fix: remove one")
        return chosen[0]


def number_in(interval: str, literal: str) -> float | None:
    """Parse a finite float within the interval, such as "[0, 1)"; None for any other text."""
    value = float(literal) if NUMBER.fullmatch(literal) else math.nan
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return value if above and below and math.isfinite(value) else None


def read_symbols(path: Path | str) -> Symbols:
    """Read the .config at `path`. ConfigError names file:line of the first fault."""
    path = Path(path)
    return Symbols(str(path), parse_lines(read_text(path), str(path)))

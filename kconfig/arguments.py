"""Parse the `CONFIG_X=v` of a command line, from arguments or from make's MAKEFLAGS."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence

from gpt2.config.dotconfig import ConfigError, Entry, parse_value, quote
from gpt2.system.errors import UserError
from kconfig.rules import Kconfig, type_name

COMMAND_LINE = "command line"


def parse_assignments(tree: Kconfig, assignments: Sequence[str]) -> dict[str, Entry]:
    """Parse `CONFIG_X=v` arguments. Text needs no quotes."""
    entries: dict[str, Entry] = {}
    for assignment in assignments:
        match = re.fullmatch(r"CONFIG_([A-Za-z0-9_]+)=(.*)", assignment, re.DOTALL)
        if not match:
            raise ConfigError(f"{COMMAND_LINE}: {assignment!r} is malformed; fix: CONFIG_NAME=value")
        symbol, value = match.groups()
        known = tree.syms.get(symbol)
        bare = known is not None and known.nodes and type_name(known) == "string" and value[:1] != '"'
        if not (value or bare) and known is not None:
            raise ConfigError(f"{COMMAND_LINE}: CONFIG_{symbol}= has no value; fix: CONFIG_{symbol}=value")
        literal = quote(value) if bare or not value else value
        entry = parse_value(symbol, literal, COMMAND_LINE)
        if symbol in entries:
            raise ConfigError(
                f"{COMMAND_LINE}: CONFIG_{symbol} is given twice, {entries[symbol]} and {entry}; fix: remove one"
            )
        entries[symbol] = entry
    return entries


def make_variables(makeflags: str) -> dict[str, str]:
    """Parse the variables of make's command line from MAKEFLAGS.

    make puts `--` before the variables, puts a backslash before white space and backslashes, and doubles every
    dollar. The last variable of a name wins, as in make.
    """
    words = re.findall(r"(?:\\.|\S)+", makeflags, re.DOTALL)
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$") for word in words]
    found: dict[str, str] = {}
    for word in words[words.index("--") + 1 :] if "--" in words else []:
        variable, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(
                f"{COMMAND_LINE}: a value ends before {word!r}; fix: use printable text on one line"
            )
        found[variable.rstrip(":?")] = value
    return found


def make_assignments(tree: Kconfig, makeflags: str, given: Sequence[str]) -> list[str]:
    """Return the CONFIG_X=v of make's command line that are not among the arguments `given`."""
    taken = {argument.partition("=")[0] for argument in given}
    symbols = [f"CONFIG_{symbol.name}" for symbol in tree.unique_defined_syms]
    found = []
    for variable, value in make_variables(makeflags).items():
        if variable.startswith("CONFIG_"):
            found += [] if variable in taken else [f"{variable}={value}"]
            continue
        meant = difflib.get_close_matches(variable, symbols, n=1, cutoff=0.9)
        if f"CONFIG_{variable}" in symbols:
            meant = [f"CONFIG_{variable}"]
        if meant:
            raise ConfigError(
                f"{COMMAND_LINE}: {variable}={value} sets no symbol; did you mean {meant[0]}={value}?"
            )
    return found


def refuse_assignments(makeflags: str | None = None) -> None:
    """Refuse CONFIG_X=v on commands other than defconfig, which would ignore it."""
    if "CONFIG_" in (os.environ.get("MAKEFLAGS", "") if makeflags is None else makeflags):
        raise UserError(
            "CONFIG_X=v on the command line has no effect here; fix: make defconfig-NAME CONFIG_X=v"
        )

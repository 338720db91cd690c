"""Parse the arguments of a command: from its own command line, or from make's by MAKEFLAGS, which no shell reads."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.dotconfig import ConfigError, Entry, parse_value, quote
from runtime.errors import UserError

if TYPE_CHECKING:
    from study.kconfig_rules import Kconfig

COMMAND_LINE = "command line"


ROOT = Path(__file__).resolve().parents[1]


MAKE_ITSELF = ("SHELL", "MAKEFLAGS", "MAKE")  # variables of make that are no argument of a command


def parse_assignments(tree: Kconfig, assignments: Sequence[str]) -> dict[str, Entry]:
    """Parse `CONFIG_X=v` arguments. Text needs no quotes."""
    from study.kconfig_rules import (
        type_name,  # set-up, which has no packages, reads the arguments of make here
    )

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


def make_variables(makeflags: str | None = None) -> dict[str, str]:
    """Parse the variables of make's command line from MAKEFLAGS, by default that of the environment.

    make puts `--` before the variables, a space between them, a backslash before each blank and backslash of a value,
    and doubles every dollar. The last variable of a name wins, as in make.
    """
    flags = os.environ.get("MAKEFLAGS", "") if makeflags is None else makeflags
    words = re.findall(r"(?:\\.|[^\\ ])+", flags, re.DOTALL)
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL).replace("$$", "$") for word in words]
    pairs = (word.partition("=") for word in (words[words.index("--") + 1 :] if "--" in words else []))
    return {variable.rstrip(":?+"): value for variable, _, value in pairs}


def variables_by_target(makefile: str) -> dict[str, list[str]]:
    """Return the variables that each target of the Makefile reads, without targets that read none."""
    return {
        target: names.split()
        for target, names in re.findall(r"^READS\.(\S+) := (.*)$", makefile, re.MULTILINE)
    }


def refuse_unknown_variables(makeflags: str | None = None, goals: str | None = None) -> None:
    """Refuse a variable of make's command line that none of its targets reads. CONFIG_X=v is not checked.

    goals: the targets of make's command line; default: MAKE_GOALS of the environment. Where there are none, a variable
    of any target passes.
    """
    goals = os.environ.get("MAKE_GOALS", "") if goals is None else goals
    by_target = variables_by_target((ROOT / "Makefile").read_text(encoding="utf-8"))
    known = ["PYTHON", *(name for names in by_target.values() for name in names)]
    read = [name for goal in goals.split() for name in by_target.get(goal, [])] if goals else known
    for name, value in make_variables(makeflags).items():
        if name in ("PYTHON", *read, *MAKE_ITSELF) or name.startswith("CONFIG_"):
            continue
        if name in known:
            raise UserError(
                f"{COMMAND_LINE}: make {goals} does not read {name}={value}; fix: leave it out; make {goals} reads "
                f"{' '.join(dict.fromkeys(read)) or 'no variable'}"
            )
        near = difflib.get_close_matches(name.upper(), read, n=1) or difflib.get_close_matches(
            name.upper(), known, n=1
        )
        fix = (
            f"did you mean {near[0]}={value}?"
            if near
            else "make help lists the commands with their variables"
        )
        raise UserError(f"{COMMAND_LINE}: no command reads {name}={value}; fix: {fix}")


def command_arguments(
    options: Sequence[str] = (), path: str = "", paths: str = "", symbols: bool = False
) -> list[str]:
    """Return the arguments of this command, or where it has none, those that make's command line gives it.

    options: the variables that become options, OUT=x as --out=x. path, paths: the variable that names the positional
    argument, or several. symbols: whether the command reads CONFIG_X=v; otherwise that is a UserError.
    """
    if len(sys.argv) > 1:
        return sys.argv[1:]
    if not symbols:
        refuse_assignments()
    given = make_variables()
    found = [f"--{name.lower()}={given[name]}" for name in options if given.get(name)]
    positional = [given[path]] if given.get(path) else split_paths(given.get(paths, ""))
    return [*found, "--", *positional] if positional else found


def split_paths(text: str) -> list[str]:
    """Split a list of paths as a shell does, with quotes, globs and ~. Paths that exist need no quotes."""
    if os.path.exists(text):
        return [text]
    words = text.split()
    if not all(map(os.path.exists, words)):
        with contextlib.suppress(ValueError):  # a quote that is not closed
            words = shlex.split(text)
    return [path for word in words for path in _matches(word)]


def _matches(word: str) -> list[str]:
    path = word if os.path.exists(word) else os.path.expanduser(word)
    return [path] if os.path.exists(path) else sorted(glob.glob(path)) or [path]


def make_assignments(
    tree: Kconfig, makeflags: str, given: Sequence[str], goals: str | None = None
) -> list[str]:
    """Return the CONFIG_X=v of make's command line that are not among the arguments `given`."""
    taken = {argument.partition("=")[0] for argument in given}
    symbols = [f"CONFIG_{symbol.name}" for symbol in tree.unique_defined_syms]
    found = []
    for variable, value in make_variables(makeflags).items():
        if variable.startswith("CONFIG_"):
            found += [] if variable in taken else [f"{variable}={value}"]
            continue
        meant = [name for name in symbols if name == f"CONFIG_{variable}"]
        meant = meant or difflib.get_close_matches(variable, symbols, n=1, cutoff=0.9)
        if meant:
            raise ConfigError(
                f"{COMMAND_LINE}: {variable}={value} sets no symbol; fix: did you mean {meant[0]}={value}?"
            )
    refuse_unknown_variables(makeflags, goals)
    return found


def refuse_assignments(makeflags: str | None = None) -> None:
    """Refuse CONFIG_X=v on commands other than defconfig, which would ignore it."""
    if any(name.startswith("CONFIG_") for name in make_variables(makeflags)):
        raise UserError(
            "CONFIG_X=v on the command line has no effect here; fix: make defconfig-NAME CONFIG_X=v"
        )

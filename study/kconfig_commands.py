"""Write, edit and check .config.

    python -m scripts.kconfig defconfig NAME[+FRAGMENT...] [CONFIG_X=v ...]
    python -m scripts.kconfig menuconfig | olddefconfig | check
    python -m scripts.kconfig savedefconfig [FILE]

Under make, `CONFIG_X=v` is read from MAKEFLAGS and NAME from DEFCONFIG, so that no shell interprets them.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2.text_sources import check_eval_files
from runtime.detected_hardware import detected_target_name
from runtime.dotconfig import ConfigError, Entry, Symbols, parse_lines, read_text
from runtime.errors import UserError
from runtime.settings import Config
from study import kconfig_rules
from study.kconfig_rules import back_up, load_leniently, load_strictly, replace_file
from study.make_arguments import (
    make_assignments,
    make_variables,
    parse_assignments,
    refuse_assignments,
    refuse_unknown_variables,
)

# Parse the arguments of a command: from its own command line, or from make's by MAKEFLAGS, which no shell reads.


CONFIG = Path(".config")
DEFCONFIGS = kconfig_rules.ROOT / "defconfigs"
USAGE = (
    "usage: python -m scripts.kconfig defconfig NAME[+FRAGMENT...] [CONFIG_X=v ...] | menuconfig | "
    "savedefconfig [FILE] | olddefconfig | check"
)


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run one command. UserError for invalid input."""
    command, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if command == "defconfig" and not rest and "DEFCONFIG" in environment:
        rest = [environment["DEFCONFIG"]]
    makeflags, goals = environment.get("MAKEFLAGS", ""), environment.get("MAKE_GOALS", "")
    if command != "defconfig":
        refuse_assignments(makeflags)
        refuse_unknown_variables(makeflags, goals)
    if command == "defconfig" and rest and "=" not in rest[0]:
        defconfig(rest[0], rest[1:], makeflags, goals)
    elif command == "savedefconfig" and len(rest) <= 1:
        savedefconfig(Path(*rest) if rest else Path("defconfig"))
    elif command in COMMANDS and not rest:
        COMMANDS[command]()
    else:
        raise ConfigError(USAGE)
    return 0


# ---- commands


def defconfig(
    specification: str, assignments: Sequence[str] = (), makeflags: str = "", goals: str = ""
) -> None:
    """Write .config from `NAME+FRAGMENT...` and the assignments of the command line."""
    tree = kconfig_rules.load_kconfig(detected_target_name())
    assignments = [*assignments, *make_assignments(tree, makeflags, assignments, goals)]
    symbols = configure(tree, read_layers(specification), assignments)
    config = Config.from_symbols(symbols)
    check_eval_files(config.evaluation.sets)
    replace_config(tree, config, f", from {specification}")


def menuconfig() -> None:
    """Edit .config in menus. Only a valid result replaces it."""
    menus = menus_module()
    tree = load_strictly(read_text(CONFIG), str(CONFIG)).tree if CONFIG.exists() else None
    tree = tree or kconfig_rules.load_kconfig(detected_target_name())
    detected = tree.syms["DETECTED"].str_value
    start = kconfig_rules.render(
        tree, minimal=True
    )  # without defaults, so that they follow the edited values
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / ".config"
        draft.write_text(start, encoding="utf-8")
        while True:
            with kconfig_rules.kconfig_environment(detected), contextlib.redirect_stdout(io.StringIO()):
                os.environ["KCONFIG_CONFIG"] = str(draft)
                menus.menuconfig(kconfig_rules.load_kconfig(detected))
            text = read_text(draft)
            if text == start:
                print(".config is unchanged")
                return
            try:
                edited = load_strictly(text, "menuconfig")
                break
            except ConfigError as error:
                print(f"error: {error}", file=sys.stderr)
                confirm_retry()
                menus = importlib.reload(menus)  # it stores nodes of the previous tree
    replace_config(edited.tree, edited.config, "")


def menus_module() -> Any:
    """Import Kconfig's menus. ConfigError where they cannot be shown."""
    try:
        import curses

        import menuconfig as menus

        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise OSError("standard input or output is none")
        curses.setupterm()
    except Exception as problem:  # curses.error derives from Exception alone and has no name without curses
        raise ConfigError(
            f"menuconfig needs a terminal and curses ({problem}); fix: make defconfig-NAME CONFIG_X=v, or edit "
            ".config and run make olddefconfig"
        ) from None
    return menus


def confirm_retry() -> None:
    """Wait until the user returns to the menus. ConfigError where the user stops."""
    try:
        input("Enter: back to the menus. Ctrl-C: stop; .config is unchanged. ")
    except (KeyboardInterrupt, EOFError):
        raise ConfigError("not saved; .config is unchanged") from None


def replace_config(tree: kconfig_rules.Kconfig, config: Config, origin: str) -> None:
    """Replace .config, save the previous one, and print the scale and the study's name."""
    text = kconfig_rules.render(tree)
    previous = back_up(CONFIG, text)
    replace_file(CONFIG, text)
    study = tree.syms["STUDY_NAME"].str_value
    if not config.grpo:
        print(scale_line(config))
    print(f"wrote .config for the study {study}{origin}{previous}")


def savedefconfig(path: Path) -> None:
    """Write the shortest defconfig that gives this .config."""
    loaded = load_strictly(read_text(CONFIG), str(CONFIG))
    header = f"# Saved from .config with the defaults for {loaded.config.target.detected}\n"
    replace_file(path, kconfig_rules.render(loaded.tree, minimal=True, header=header))
    print(f"wrote {path}; save it as defconfigs/NAME to use it with `make defconfig-NAME`")


def olddefconfig() -> None:
    """Update .config to the Kconfig files and print the changes."""
    detected = "" if "CONFIG_DETECTED=" in read_text(CONFIG) else detected_target_name()
    loaded = load_leniently(read_text(CONFIG), str(CONFIG), detected)
    text = kconfig_rules.render(loaded.tree)
    if text == read_text(CONFIG):
        print(".config is up to date")
        return
    previous = back_up(CONFIG, text)
    replace_file(CONFIG, text)
    print(*loaded.notes, f"wrote .config{previous}", sep="\n")


def check() -> Config:
    """Load .config. ConfigError names the first line that is incomplete or inconsistent."""
    return load_strictly(read_text(CONFIG), str(CONFIG)).config


def listing() -> dict[str, list[tuple[str, str]]]:
    """Return the defconfigs and the fragments, each with its first comment line. Needs no kconfiglib."""
    bases = [path for path in sorted(DEFCONFIGS.iterdir()) if path.is_file()]
    rows = [(f"defconfig-{path.name}", first_comment(path)) for path in bases]
    more = [(f"+{path.name}", first_comment(path)) for path in fragments()]
    return {"defconfigs (make defconfig-NAME)": rows, "fragments (make defconfig-NAME+FRAGMENT)": more}


# ---- defconfigs


def configure(
    tree: kconfig_rules.Kconfig, layers: Sequence[Mapping[str, Entry]], assignments: Sequence[str]
) -> Symbols:
    """Set the tree to these layers and the assignments `CONFIG_X=v`. Returns its checked symbols."""
    entries = kconfig_rules.merge(tree, [*layers, parse_assignments(tree, assignments)])
    return kconfig_rules.check_tree(tree, {entry.name: entry.where for entry in entries})


def read_layers(specification: str) -> list[dict[str, Entry]]:
    """Read the files of `NAME+FRAGMENT...`."""
    return [parse_lines(read_text(path), display_name(path)) for path in find_files(specification)]


def fragments() -> list[Path]:
    return [path for path in sorted(DEFCONFIGS.glob("*/*")) if path.is_file()]


def first_comment(path: Path) -> str:
    first = read_text(path).partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def display_name(path: Path) -> str:
    """Return the path for messages, relative to the repository where possible."""
    return str(path.relative_to(kconfig_rules.ROOT) if path.is_relative_to(kconfig_rules.ROOT) else path)


def find_files(specification: str) -> list[Path]:
    """Return the files of `NAME+FRAGMENT...`. ConfigError suggests a close match for a missing one."""
    base, *rest = specification.split("+")
    bases = {path.name: path for path in DEFCONFIGS.iterdir() if path.is_file()}
    parts = {path.name: path for path in fragments()}
    for part in rest:
        if rest.count(part) > 1:
            raise ConfigError(f"the fragment {part} is named twice; fix: name it once")
    return [
        _lookup(base, "defconfig", bases, parts),
        *(_lookup(part, "fragment", parts, bases) for part in rest),
    ]


def _lookup(wanted: str, kind: str, files: Mapping[str, Path], others: Iterable[str]) -> Path:
    """Return the file of that name. others: names of the other kind."""
    if wanted in files:
        return files[wanted]
    hint = f"fix: use one of {_names(files)}"
    if wanted in others:
        other = "fragment" if kind == "defconfig" else "whole defconfig"
        raise ConfigError(f"{wanted} is a {other}, not a {kind}; {hint}")
    longer = sorted(file for file in files if wanted and file.startswith(wanted))
    near = longer or difflib.get_close_matches(wanted, files, n=1)
    if near:
        hint = f"fix: did you mean {' or '.join(near)}?"
    raise ConfigError(f'there is no {kind} "{wanted}"; {hint}')


def _names(files: Iterable[str]) -> str:
    return ", ".join(sorted(files))


# ---- .config


def scale_line(config: Config) -> str:
    """Describe the study's scale and its reason in one line."""
    target, found = config.target.name, config.target.detected
    scale = "CPU" if config.target.scale_cpu else "GPU"
    why = f"target {target} ({found} found here): a {scale} study"
    if target == "auto":
        why = "no GPU found: scaled to a CPU study" if scale == "CPU" else f"found {found}: a GPU study"
    return (
        f"{why} (model {config.model.size}, sequences of {config.model.block_size}, effective batch "
        f"{config.batch.effective}, {config.budget.text} a run, data {config.data.dataset})"
    )


COMMANDS: dict[str, Callable[[], object]] = {
    "menuconfig": menuconfig,
    "olddefconfig": olddefconfig,
    "check": check,
}


STUDY = "gpt2-ra-ablation"


def symbols_for_target(name: str, base: str = "", makeflags: str | None = None) -> tuple[Symbols, str]:
    """Return the symbols of `make defconfig-gpt2-ra-ablation+NAME CONFIG_X=v` and their source in words.

    base: a .config whose settings are used instead of the defconfig's, with NAME as its target. makeflags: of make,
    with the CONFIG_X=v of its command line; default: MAKEFLAGS of the environment.
    """
    specification = f"{STUDY}+{name}"
    if "+" in name:
        raise UserError(f'TARGET={name} combines several targets; fix: TARGET="{name.replace("+", " ")}"')
    layers = read_layers(specification)
    tree = kconfig_rules.load_kconfig(name)
    variables = make_variables(makeflags)
    assignments = [f"{key}={value}" for key, value in variables.items() if key.startswith("CONFIG_")]
    if base:
        layers[0] = _without_target(Path(base))
    source = f"{base} with target {name}" if base else specification
    return configure(tree, layers, assignments), " ".join([source, *assignments])


def _without_target(path: Path) -> dict[str, Entry]:
    """Return the settings of a .config that differ from the defaults, except its target."""
    if not path.exists():
        raise UserError(f"FROM={path} does not exist; fix: FROM=.config after `make defconfig-{STUDY}`")
    loaded = kconfig_rules.load_strictly(read_text(path), str(path))
    entries = parse_lines(kconfig_rules.render(loaded.tree, minimal=True), str(path))
    return {
        key: entry for key, entry in entries.items() if not key.startswith("TARGET_") and key != "DETECTED"
    }

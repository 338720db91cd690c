"""CONFIG_ADMISSION_IGNORE, and the failed checks that it lets a study train. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpt2.artifacts.typed_json import JsonObject, Text, read_file
from gpt2.config.dotconfig import Symbols
from gpt2.system import files
from ra.admission.results import CHECKS

SYMBOL = "ADMISSION_IGNORE"
FILE = "admission.json"


@dataclass(frozen=True)
class Admissions(JsonObject):
    """The content of admission.json. ignored: variant -> the checks that it fails and that are ignored."""

    ignored: Mapping[str, tuple[Text, ...]] = field(default_factory=dict)


def read(study_dir: Path) -> Admissions:
    """Read admission.json; a study without it ignores nothing."""
    try:
        return read_file(Admissions, study_dir / FILE)
    except FileNotFoundError:
        return Admissions()


def write(study_dir: Path, ignored: Mapping[str, tuple[str, ...]]) -> None:
    """Write admission.json, with the variants that an earlier `make` ignored."""
    together = {**read(study_dir).ignored, **ignored}
    if together:
        files.write_json(study_dir / FILE, Admissions(together).to_json())


def ignored_checks(symbols: Symbols, variants: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Variant -> checks to ignore. ConfigError for a malformed entry, an unknown variant and an unknown check."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in symbols.text(SYMBOL, absent="").split():
        name, separator, check = entry.rpartition(":")
        if not separator or not name:
            raise symbols.error(
                SYMBOL,
                f'has the malformed entry {entry}; fix: CONFIG_{SYMBOL}="VARIANT:check", such as MINE:causal',
            )
        if name not in variants:
            raise symbols.error(
                SYMBOL,
                f"names {name}, which is not in CONFIG_VARIANTS; fix: use one of {', '.join(variants)}",
            )
        if check not in CHECKS:
            raise symbols.error(
                SYMBOL, f"names the unknown check {check}; fix: use one of {', '.join(CHECKS)}"
            )
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), check)))
    return found

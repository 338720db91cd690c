"""Examine the variants of a study before it times or trains anything. Results are saved by the hash of the sources."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ra import names
from ra.admission.process import examine_variants
from ra.admission.results import Examination
from ra.alternation import AlternationSettings
from ra.arms import parse_arm
from runtime import files
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.settings import Config
from runtime.typed_json import InvalidJsonError, read_file

ROOT = Path(__file__).parents[2]


def examine_cached(
    variants: Sequence[str], config: Config, alternation: AlternationSettings, autocast: bool
) -> dict[str, Examination]:
    """Examine the variants that have no saved result for these sources, this torch and this shape.

    Arms that differ in the optimizer alone share an examination.
    """
    models = {name: parse_arm(name).model_name for name in variants}
    paths = {model: _saved(model, config, alternation, autocast) for model in models.values()}
    found: dict[str, Examination] = {}
    for model, path in paths.items():
        with contextlib.suppress(FileNotFoundError, DamagedFileError, InvalidJsonError):
            found[model] = read_file(Examination, path)
    new = [model for model in paths if model not in found]
    if new:
        began = time.monotonic()
        print(f"examining {', '.join(new)}: causality, batches, modes, gradients and more", flush=True)
        examined = examine_variants(new, config.model, alternation, autocast)
        print(f"examined in {time.monotonic() - began:.0f} s; `make admit VARIANT=NAME` shows every check")
        for model, result in examined.items():
            paths[model].parent.mkdir(parents=True, exist_ok=True)
            if result.complete:  # a crash or a time limit may have another cause than the source
                files.write_json(paths[model], result.to_json())
        found |= examined
    return {name: _renamed(found[model], name) for name, model in models.items()}


def _renamed(examination: Examination, name: str) -> Examination:
    violations = tuple(dataclasses.replace(one, variant=name) for one in examination.violations)
    return dataclasses.replace(examination, variant=name, violations=violations)


def _saved(name: str, config: Config, alternation: AlternationSettings, autocast: bool) -> Path:
    """The file of a variant's result: its name is the hash of everything that the result depends on."""
    digest = hashlib.sha256()
    sources = [path for folder in ("gpt2", "ra") for path in ROOT.glob(f"{folder}/**/*.py")]
    custom = any(map(names.is_custom, parse_arm(name).file_variants))
    for path in sorted({*sources, *names.CUSTOM_FOLDER.glob("*.py")}):
        if path.parent != names.CUSTOM_FOLDER or custom:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    settings = [dataclasses.asdict(config.model), dataclasses.asdict(alternation), name, autocast]
    machine = [importlib.metadata.version("torch"), platform.python_version(), platform.machine()]
    digest.update(json.dumps([settings, machine]).encode())
    return config.data.directory / f".admission-{digest.hexdigest()[:16]}.json"


def require_admitted(examinations: Mapping[str, Examination]) -> None:
    """Raise UserError for a failed check: its first violation, with the fix and the number of the others."""
    refused = [violation for examination in examinations.values() for violation in examination.violations]
    if not refused:
        return
    first = refused[0]
    others = len({(one.variant, one.check) for one in refused} - {(first.variant, first.check)})
    more = f"; {others} more failed checks: make admit VARIANT={first.variant}" if others else ""
    raise UserError(f"{first}{more}")

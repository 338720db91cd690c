"""The record of a run: run.json and metrics.jsonl. Standard library only.

run.json is written whole or not at all and follows run.schema.json (schema 1); numbers that are not known, or not
finite, are null.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, TextIO

from gpt2.system.errors import UserError
from gpt2.system.files import finite

SCHEMA = 1
CHECKPOINTS = (
    "checkpoint",
    "stable",
)  # folders of a run: its newest states, and the one where its decay began
_SCHEMA_FILE = Path(__file__).with_name("run.schema.json")


class RecordError(UserError, RuntimeError):
    """A record is missing, cannot be read, or is of another schema."""


def append_metrics(file: TextIO, line: dict[str, Any]) -> None:
    """One JSON object a line, handed to the system at once so that a killed run loses none."""
    file.write(json.dumps(finite(line), allow_nan=False) + "\n")
    file.flush()


def run_name(variant: str, seed: int) -> str:
    """The run's folder: RALEARN0. Listed layers get a separator, so that no two runs share a name: RA-5-7_9.0."""
    if variant.startswith("RA:"):
        return f"{variant.replace(':', '-').replace(',', '_')}.{seed}"
    return f"{variant}{seed}" if not variant[-1:].isdigit() else f"{variant}.{seed}"


def blank(run: str, variant: str, seed: int) -> dict[str, Any]:
    """A record with every key, null until known."""
    return {
        "schema": SCHEMA,
        "run": run,
        "variant": variant,
        "seed": seed,
        "status": "running",
        "error": None,
        "commit": None,
        "dirty": None,
        "config_sha256": None,
        "fingerprint": None,
        "target": None,
        "batch": None,
        "parameters": None,
        "progress": None,
        "clock": None,
        "validation": None,
        "hellaswag": None,
        "memory": None,
        "throughput": None,
        "learned": None,
        "schedule": None,
        "notes": [],
    }


def load(run_dir: Path, name: str = "run.json") -> dict[str, Any]:
    """The record in `run_dir`; RecordError where it is missing, corrupt, of another schema or does not follow it."""
    path = run_dir / name
    try:
        value = json.loads(
            path.read_text(encoding="utf-8"), parse_float=_finite_number, parse_constant=_finite_number
        )
    except FileNotFoundError as error:
        raise RecordError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        seen = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise RecordError(f"{path} is of schema {seen!r}; this version reads schema {SCHEMA}")
    problems = validate(value)
    if problems:
        raise RecordError(f"{path} does not follow the schema: {problems[0]}")
    return value


def _finite_number(text: str) -> float:
    """A number of a record; Python would also read NaN, Infinity and 1e999, none of which are JSON's."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def validate(value: Any) -> list[str]:
    """What is wrong with a record by run.schema.json, a line each; empty when it follows it."""
    return _check(value, _schema(), "record")


@functools.cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(_SCHEMA_FILE.read_text())
    return schema


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "null": (type(None),), "boolean": (bool,),
    "number": (int, float), "integer": (int,),
}  # fmt: skip


def _is(value: Any, kind: str) -> bool:
    if kind in ("number", "integer") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _check(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """The part of JSON Schema that run.schema.json uses; an independent validator checks it in the tests."""
    kinds = schema.get("type")
    fits = _is(value, kinds) if isinstance(kinds, str) else any(_is(value, kind) for kind in kinds or ())
    if kinds and not fits:
        return [f"{where} is {json.dumps(value)[:60]}; {kinds} expected"]
    problems = []
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"{where} is {value!r}; one of {schema['enum']} expected")
    if _is(value, "number"):
        if value < schema.get("minimum", value):
            problems.append(f"{where} is {value}; at least {schema['minimum']} expected")
        if value > schema.get("maximum", value):
            problems.append(f"{where} is {value}; at most {schema['maximum']} expected")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        problems.append(f"{where} is empty")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        problems += [f"{where}.{key} is missing" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            if key in properties:
                problems += _check(item, properties[key], f"{where}.{key}")
            elif schema.get("additionalProperties") is False:
                problems.append(f"{where}.{key} is not part of the schema")
    if isinstance(value, list):
        problems += _check_list(value, schema, where)
    return problems


def _check_list(value: list[Any], schema: dict[str, Any], where: str) -> list[str]:
    """prefixItems describes the first entries one by one; items describes every one behind them."""
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(value))
    first, rest = schema.get("prefixItems", []), schema.get("items", {})
    problems = []
    if not low <= len(value) <= high:
        problems.append(
            f"{where} has {len(value)} entries; {low} to {schema.get('maxItems', 'any')} expected"
        )
    for number, item in enumerate(value):
        problems += _check(item, first[number] if number < len(first) else rest, f"{where}[{number}]")
    return problems

"""Check local files of a task before the harness reads them: its errors name neither file nor line nor field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from referee.numerics.text_files import json_lines, read_json, text_parts
from runtime.errors import UserError, one_line

TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
CONDITIONAL = ("{%", "is defined", "default", " if ", " or ")  # an item of such a template may lack a field


def check_files(name: str, files: Mapping[str, Sequence[Path]], config: Mapping[str, Any]) -> None:
    """UserError for files without items, unreadable ones, and items without a field that the templates need.

    files: split -> its files. config: the task's definition, with functions as names.
    """
    wanted = needed_fields(config)
    for split, paths in files.items():
        count = 0
        for path in paths:
            for where, row in _rows(path):
                count += 1
                if not isinstance(row, dict):
                    raise UserError(
                        f"{where} is {json.dumps(row)[:40]}, not an item; fix: one object with fields a line, such as "
                        '{"text": "..."}'
                    )
                if missing := [field for field in wanted if field not in row]:
                    raise _missing(name, where, missing, row)
        if not count:
            raise UserError(
                f"{paths[0]} has no items of {name} (split {split}); fix: copy the file again, or take {name} out of "
                "TASKS"
            )


def missing_field(name: str, paths: Sequence[Path], error: BaseException | None) -> UserError | None:
    """Return the error for the field that a function of the task did not find. None where a field is not the cause."""
    while error is not None:
        if isinstance(error, KeyError) and error.args:
            field = str(error.args[0])
            for path in paths:
                for where, row in _rows(path):
                    if isinstance(row, dict) and field not in row:
                        return _missing(name, where, [field], row)
        error = error.__cause__ or error.__context__
    return None


def needed_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields of an item that the task's templates always use. Functions of the task may need others."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    if config.get("process_docs"):
        return []  # it may rename the fields
    found: dict[str, None] = {}
    templates = Environment()
    for key in TEMPLATES:
        text = config.get(key)
        if not isinstance(text, str) or any(word in text for word in CONDITIONAL):
            continue
        if key == "doc_to_target" and text.isidentifier() and config.get("output_type") == "multiple_choice":
            choices = config.get("doc_to_choice")
            if not (isinstance(choices, list) and text in choices):
                found[text] = None
        try:
            used = meta.find_undeclared_variables(templates.parse(text)) - set(templates.globals)
        except TemplateSyntaxError:
            continue
        found |= dict.fromkeys(sorted(used))
    return list(found)


def _missing(name: str, where: str, fields: Sequence[str], row: Mapping[str, Any]) -> UserError:
    present = ", ".join(map(str, row)) or "no field"
    return UserError(
        f"{where} has no {' and no '.join(fields)}, which {name} needs (it has {present}); "
        f"fix: add {' and '.join(fields)} to every item, in the form that the data set of {name} has on the hub"
    )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line or item, item). UserError for a broken file."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        try:
            table = parquet.ParquetFile(path)
            names, count = table.schema_arrow.names, table.metadata.num_rows
        except Exception as error:  # of pyarrow
            raise UserError(
                f"{path} is not a readable parquet file ({one_line(error)}); fix: copy the file again"
            ) from error
        if count:  # every row has every column
            yield str(path), dict.fromkeys(names)
        return
    if path.suffix == ".json" and next(text_parts(path), "").lstrip().startswith("["):  # one list
        rows = enumerate(read_json(path), 1)
        yield from ((f"{path}, item {number},", row) for number, row in rows)
    else:
        yield from json_lines(path)

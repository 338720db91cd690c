"""Compare the checklists of two machines: what differs, in three grades."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from referee.errors import NumericsError
from referee.numerics.rows import TableRow, text_table
from referee.numerics.setup.checklist_rows import (
    EQUAL,
    FATAL,
    HARMLESS,
    NOT_RECORDED,
    NOT_SET,
    SUSPECT,
    ChecklistRow,
    Tables,
    compare_values,
    counts,
    read_checklist,
    worst_first,
)
from referee.numerics.setup.script_settings import variable_grade
from referee.numerics.text_files import write_json, writing

DATA = "check_config.json"
MOST_ROWS = 40  # in the terminal
ABSENT = "absent"
HOW = {  # group -> what ConfigChecker needs to collect it
    "machine": "",
    "environment": "",
    "packages": "",
    "hyperparameters": "shell_path or hyperparameters",
    "model": "model",
    "weights": "model",
    "data": "data, or model and one forward pass",
    "random": "model",
    "scripts": "shell_path",
}
MISSING = {"environment": NOT_SET, "packages": "not installed"}  # group -> value of an absent entry
MISSING |= dict.fromkeys(("machine", "data", "random"), NOT_RECORDED)
HEADS = ("class", "form")  # where this entry of a module or a tensor differs, its others are no rows

# Grades of what differs; docs/check-config.md has the reasons.
GRADES = {
    "packages": HARMLESS,
    "model": FATAL,
    "weights": FATAL,
    "data": FATAL,
    "random": SUSPECT,
    "scripts": SUSPECT,
}
MACHINE = {
    "default dtype": FATAL,
    "float32_matmul": FATAL,
    "TF32 of convolutions": SUSPECT,
    "reduced-precision sums of float16": SUSPECT,
    "reduced-precision sums of bfloat16": SUSPECT,
}
# Packages of which a version can change more than rounding.
COMPUTING = (
    "torch torchvision torch-npu transformers tokenizers datasets accelerate deepspeed peft trl verl vllm sglang "
    "megatron-core transformer-engine flash-attn xformers triton bitsandbytes timm lightning mindspeed numpy tiktoken"
)
# Words of a setting's name that decide its grade, without the s at the end. With those of script_settings they are 40.
TRAINING = (
    "lr learning batch beta eps decay dropout warmup seed hidden layer head seq length epoch step clip momentum "
    "optimizer precision dtype accumulation variant parallel zero attn activation"
)
ASIDE = "log logging save output project port host"
PLACES = "dir path file folder"


def grade(group: str, name: str, values: Sequence[str]) -> str:
    """Return the grade of an entry that differs."""
    key = name.rpartition(": ")[2]
    if group == "machine":
        return MACHINE.get(name, HARMLESS)
    if group == "environment":
        return variable_grade(name)
    if group == "packages" and name in COMPUTING.split():
        return SUSPECT
    if group == "hyperparameters":
        return setting_grade(name, one_sided=ABSENT in values)
    if group == "model" and ABSENT not in values:
        if key == "training" or (key == "class" and len({value.rpartition(".")[2] for value in values}) == 1):
            return SUSPECT  # a mode, or a class of the same name from another file
        if all("/" in value for value in values):
            return HARMLESS  # a path
    return GRADES[group]


def setting_grade(name: str, one_sided: bool = False) -> str:
    """Return the grade of a setting that differs, by the words of its name."""
    words = {word.rstrip("s") for word in re.split(r"[_.]", name)}
    if words & set(ASIDE.split()):
        return HARMLESS
    if one_sided or words & set(PLACES.split()):
        return SUSPECT
    return FATAL if words & {word.rstrip("s") for word in TRAINING.split()} else SUSPECT


def compare_checklists(a: str | Path, b: str | Path) -> list[ChecklistRow]:
    """Compare two zips, the worst rows first. NumericsError names the one that cannot be used."""
    first, second = read_checklist(a), read_checklist(b)
    return worst_first([row for group in HOW for row in compare_group(group, first, second)])


def compare_group(group: str, first: Tables, second: Tables) -> list[ChecklistRow]:
    """Compare each entry of a group. A group or an entry that a side lacks may be not recorded."""
    tables = [first.get(group, {}), second.get(group, {})]
    if group not in first or group not in second:
        values = tuple(f"{len(table)} entries" if table else NOT_RECORDED for table in tables)
        fix = f"pass {HOW[group]} to ConfigChecker on both sides"
        return [ChecklistRow(group, group, NOT_RECORDED, values, fix, False)]
    rows: list[ChecklistRow] = []
    heads: set[str] = set()  # modules and tensors whose first entry differs
    names = {**tables[0], **tables[1]}
    for name in sorted(names, key=lambda name: (not name.endswith(HEADS), name.rpartition(": "))):
        values = tuple(table.get(name, MISSING.get(group, ABSENT)) for table in tables)
        place, _, key = name.rpartition(": ")
        if key in HEADS and values[0] != values[1]:
            heads.add(place)
            if ABSENT in values and place.rpartition(".")[0] in heads:
                continue  # the whole module around it is on one side
        elif place in heads:
            continue
        row = compare_values(group, name, [{value} for value in values], grade(group, name, values), "")
        rows.append(
            replace(row, status=NOT_RECORDED) if NOT_RECORDED in values and row.status != EQUAL else row
        )
    return rows


def table_rows(rows: Sequence[ChecklistRow]) -> list[TableRow]:
    """Return the rows that differ; the second zip is the target."""
    return [
        TableRow(
            f"{row.group}: {row.subject}",
            row.status,
            "",
            row.values[1],
            row.values[0],
            math.nan,
            evidence=row.reason,
        )
        for row in rows
        if row.status != EQUAL
    ]


PACK = """
Pack environment variables, package versions, the given scripts with their hyperparameters, and digests of data files
into a zip. Passwords, tokens and keys are left out. With a model, use referee.numerics.ConfigChecker in the training
script.
"""
COMPARE = """
Compare two zips: equal, or one of three grades; the second zip is the target. Writes
OUT/check_config.json. The exit status is 0 for every verdict; it is 1 where a zip cannot be used.
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add check-config to the commands of `python -m referee`."""
    parser = commands.add_parser("check-config", help="pack and compare the checklist of two machines")
    actions = parser.add_subparsers(dest="action", required=True)
    pack = actions.add_parser("pack", description=PACK, help="pack this machine's checklist")
    pack.add_argument("scripts", nargs="*", help="scripts and configuration files of the training")
    pack.add_argument("-o", "--output_path", default="./config_check_pack.zip", help="the zip")
    pack.add_argument("--data", nargs="+", metavar="FILE", help="files or folders to digest")
    pack.set_defaults(run=run_pack)
    compare = actions.add_parser("compare", description=COMPARE, help="compare two zips")
    compare.add_argument("zips", nargs="*", metavar="ZIP", help="the zips of two machines")
    out = os.environ.get("CHECK_OUT") or "check-config"
    compare.add_argument("-o", "--output_path", type=Path, default=out, help="folder of results")
    compare.set_defaults(run=run_compare)


def run_pack(given: argparse.Namespace) -> int:
    from referee.numerics.setup.config_checker import ConfigChecker

    checker = ConfigChecker(shell_path=given.scripts, output_zip_path=given.output_path, data=given.data)
    print(f"wrote {checker.path}")
    return 0


def run_compare(given: argparse.Namespace) -> int:
    zips = given.zips or [path for name in ("A", "B") if (path := os.environ.get(f"CHECK_{name}"))]
    if len(zips) != 2:
        raise NumericsError(
            f"two zips are needed, {len(zips)} given; fix: compare A.zip B.zip (make: A=A.zip B=B.zip)"
        )
    rows, path = compare_checklists(*zips), given.output_path / DATA
    verdict = rows[0].status if rows else EQUAL
    with writing(given.output_path, "give another folder by -o"):
        write_json(path, {"verdict": verdict, "a": Path(zips[0]).name, "b": Path(zips[1]).name,
                          "rows": [vars(row) for row in rows]})  # fmt: skip
    table = table_rows(rows)
    more = [f"{len(table) - MOST_ROWS} more rows"] if len(table) > MOST_ROWS else []
    lines = [f"checklist: {verdict}", f"entries: {counts(rows)}", *text_table(table[:MOST_ROWS]), *more]
    print(*lines, sep="\n")
    print(f"wrote {path}")
    return 0

"""msProbe's first row that does not pass is read from its table and placed in the model."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench.numerics import msprobe
from bench.numerics.corpus import Answer, with_msprobe
from bench.numerics.faults import FAULTS, VALUES
from bench.numerics.models import OURS

FAKE = """#!{python}
import pathlib, sys
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
rows = pathlib.Path(arguments["-tp"]).with_name("answer.csv")
if rows.exists():
    pathlib.Path(arguments["-o"], "compare_result_1.csv").write_text(rows.read_text(), encoding="utf-8-sig")
"""
CALLS = {
    "Functional.gelu.1.forward": "Module.blocks.1.mlp.MLP.forward.0",
    "Module.blocks.1.mlp.MLP.forward.0": None,
}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of three steps, with a program that answers with a table beside the record."""
    program = tmp_path / "bin" / "msprobe"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    for step in ("step0", "step10", "step9"):
        rank = tmp_path / step / "rank0"
        rank.mkdir(parents=True)
        (rank / "construct.json").write_text(json.dumps(CALLS))
        (rank / "answer.csv").write_text("NPU Name,Result\nFunctional.linear.0.forward.output.0,pass\n")
    return tmp_path


def answer(target: Path, step: str, *rows: str) -> None:
    lines = "".join(f"{row},error\n" for row in rows)
    (target / step / "rank0" / "answer.csv").write_text(f"NPU Name,Result\n{lines}")


def test_the_first_row_of_the_first_step_counts(target: Path) -> None:
    assert msprobe.first_flagged(target, target) is None
    answer(target, "step10", "Module.blocks.0.norm1.LayerNorm.forward.0.output.0")
    answer(target, "step9", "Functional.gelu.1.forward.output.0", "Module.token.Embedding.forward.0.input.0")
    assert msprobe.first_flagged(target, target) == "blocks.1.mlp: Functional.gelu.1.forward.output.0"


def test_a_function_is_placed_in_the_module_around_it(target: Path) -> None:
    gelu = next(fault for fault in FAULTS if fault.name == "other GELU")
    assert msprobe.names(gelu, gelu.kinds[0], "blocks.1.mlp: Functional.gelu.1.forward.output.0")
    assert not msprobe.names(gelu, gelu.kinds[0], "blocks.1.mlp: Functional.gelu.1.backward.output.0")
    assert not msprobe.names(gelu, gelu.kinds[0], "blocks.0.mlp: Functional.gelu.0.forward.output.0")


def test_a_missing_table_is_counted_as_refused(target: Path) -> None:
    (target / "step0" / "rank0" / "answer.csv").unlink()
    with pytest.raises(msprobe.RefusedError, match="wrote no table"):
        msprobe.first_flagged(target, target)
    found = with_msprobe(Answer(FAULTS[0].name, OURS, VALUES, "", True), FAULTS[0], target, target)
    assert (found.msprobe, found.msprobe_right, found.msprobe_refused) == (None, False, True)

"""Loss files of other trainers, and files that are none."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.errors import NumericsError
from referee.verdict.loss_files import read_curve
from tests.referee.numerics.diagnose.curves import write

LOSSES = {1: 3.5, 2: 3.25, 4: math.nan}
OURS = """{"event": "train", "iteration": 1, "tokens": 64, "loss": 3.5, "grad_norm": 1.5, "learning_rate": 0.1}
{"event": "validation", "iteration": 1, "tokens": 64, "loss": 3.4}
{"event": "train", "iteration": 2, "tokens": 128, "loss": 3.25, "grad_norm": null}
{"event": "spike", "iteration": 2, "loss": 9.0, "expected": 3.0}
{"event": "train", "iteration": 4, "tokens": 256, "loss": null, "grad_norm": 2.5}
"""
HF = {
    "global_step": 4,
    "log_history": [
        {"step": 1, "loss": 3.5, "grad_norm": 1.5, "learning_rate": 0.1},
        {"step": 2, "loss": 3.25},
        {"step": 2, "eval_loss": 3.4, "eval_runtime": 2.0, "eval_samples_per_second": 9.0},
        {"step": 4, "loss": math.nan, "grad_norm": 2.5},
        {"step": 4, "train_runtime": 9.0, "train_loss": 3.3},
    ],
}
MEGATRON = """ building GPT model ...
 [t] iteration        1/     100 | consumed samples: 4 | lm loss: 3.500000E+00 | loss scale: 1.0 | grad norm: 1.500 |
 [t] iteration        2/     100 | consumed samples: 8 | lm loss: 3.250000E+00 | loss scale: 1.0 | grad norm: 2.500 |
 [t] iteration        4/     100 | consumed samples: 9 | lm loss: nan | loss scale: 1.0 | grad norm: 2.500 |
"""
TEXTS = {
    "header": "step,loss\n1,3.5\n2,3.25\n4,nan\n",
    "other columns": "epoch,Train/Loss,global_step\n0,3.5,1\n0,3.25,2\n0,NaN,4\n",
    "tensorboard": "Wall time,Step,Value\n17.1,1,3.5\n17.2,2,3.25\n17.3,4,nan\n",
    "wandb": '"Step","run-7 - train/loss","run-7 - train/loss__MIN"\n"1","3.5","3.5"\n"2","3.25","3"\n"4","NaN","3"\n',
    "no header": "1,3.5\n2,3.25\n4,nan\n",
    "tabs": "iteration\tloss\n1\t3.5\n2\t3.25\n4\tNaN\n",
    "semicolons": "step;loss\r\n1;3.5\r\n2;3.25\r\n4;nan\r\n",
    "blanks": "# step loss\n1 3.5\n\n2 3.25\n4 nan",
    "bom": "\ufeffstep,loss\n1,3.5\n2,3.25\n4,nan\n",
    "ours": OURS,
    "torn": OURS + '{"event": "train", "iter',
    "trainer_state": json.dumps(HF, indent=2),
    "trainer_state in one line": json.dumps(HF),
    "log": "step 1 | loss 3.5\nstep 2 | loss 3.25\nvalidation\nstep 4 | loss nan\n",
    "megatron": MEGATRON,
    "keys": '{"step": 1, "train/loss": 3.5}\n{"step": 2, "train/loss": "3.25"}\n{"step": 4, "train/loss": NaN}\n',
    "repeated": "step,loss\n1,3.5\n2,9\n4,9\n2,3.25\n4,nan\n",
    "unordered": "step,loss\n4,nan\n1,3.5\n2,3.25\n",
    "damaged lines": "step,loss\n1,3.5\nx,y\n2,3.25\n3\n4,nan\n1.5,2\n",
    "empty cells": "step,loss,eval_loss\n1,3.5,\n2,3.25,3.4\n3,,3.3\n4,nan,\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_trainers(name: str, tmp_path: Path) -> None:
    found = read_curve(write(tmp_path / "file", TEXTS[name]))
    assert repr(found.losses) == repr(LOSSES)
    assert found.numbered


def test_norms_evaluations_and_counts(tmp_path: Path) -> None:
    ours = read_curve(write(tmp_path / "a", OURS))
    assert ours.gradient_norms == {1: 1.5, 4: 2.5}
    assert ours.evaluations == {"validation loss": {1: 3.4}}
    state = read_curve(write(tmp_path / "b", TEXTS["trainer_state"]))
    assert state.gradient_norms == {1: 1.5, 4: 2.5}
    assert state.evaluations == {"eval_loss": {2: 3.4}}
    assert read_curve(write(tmp_path / "c", MEGATRON)).gradient_norms == {1: 1.5, 2: 2.5, 4: 2.5}
    table = read_curve(write(tmp_path / "d", "1 3.5 1.5\n2 3.25 2.5\n"))
    assert table.gradient_norms == {1: 1.5, 2: 2.5}
    assert read_curve(write(tmp_path / "e", TEXTS["repeated"])).damaged == 0
    assert read_curve(write(tmp_path / "f", TEXTS["damaged lines"])).damaged == 3
    assert read_curve(write(tmp_path / "g", TEXTS["torn"])).damaged == 1


@given(st.lists(st.floats(), min_size=1, max_size=30), st.sampled_from(["lines", "json", "csv"]))
def test_every_number_is_read_to_the_bit(values: list[float], form: str) -> None:
    import tempfile

    texts = {
        "lines": "\n".join(map(repr, values)),
        "json": "\n".join(json.dumps({"step": step + 1, "loss": value}) for step, value in enumerate(values)),
        "csv": "step,loss\n" + "\n".join(f"{step + 1},{value!r}" for step, value in enumerate(values)),
    }
    with tempfile.TemporaryDirectory() as folder:
        found = read_curve(write(Path(folder) / "file", texts[form]))
    assert repr(list(found.losses.values())) == repr(values)
    assert list(found.losses) == list(range(1, len(values) + 1))
    assert found.numbered == (form != "lines")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        ("\u2028\n\u2003".encode(), "is empty"),
        (b"a," + b"b" * 200_000 + b"\n1,2\n", "no table"),
        (b"\x89PNG\0\0\x01", "binary"),
        (b"step,loss\n1,\xff\xfe\n", "not UTF-8"),
        (b"step,accuracy\n1,0.5\n", "no column of losses"),
        (b"step,loss\na,b\n", "no loss in any line"),
        (b'{"step": 1}\n', "no loss in any line"),
        (b"{broken\n", "no loss in any line"),
        (b'{"a": {"b": 1}}', "no loss in any line"),
    ],
)
def test_a_file_without_losses_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=message) as error:
        read_curve(write(tmp_path / "file", content))
    assert "fix: " in str(error.value)
    assert len(str(error.value)) < 400


def test_other_things_than_files_are_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "missing", "cannot be read"),
        (tmp_path, "without metrics.jsonl"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(NumericsError, match=message):
            read_curve(path)

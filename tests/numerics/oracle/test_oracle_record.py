"""The operations of a record: their arguments, generated values, what is skipped; no false alarm on a clean record."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics import NumericsError, Recorder, RecorderConfig
from numerics.compare.table.step_record import Value
from numerics.oracle.check import Oracle, random_gradients
from numerics.oracle.command import check_all
from numerics.oracle.extremes import extreme_checks
from numerics.oracle.inputs import generated
from numerics.oracle.masks import causal_row_length, misread_mask
from numerics.oracle.operation import Operation
from numerics.oracle.record import LOST, operations
from numerics.oracle.report import report_document
from numerics.oracle.results import Check, Skipped
from pages.document import render_terminal
from tests.numerics.compare.small_models import STATISTICS, TENSORS, record
from tests.numerics.corpus.models import ours


def checked(path: Path) -> tuple[list[Check], list[Skipped]]:
    oracle = Oracle(torch.device("cpu"))
    for found in operations(path):
        if isinstance(found, Skipped):
            oracle.skipped.append(found)
        else:
            oracle.check(found)
    return oracle.checks, oracle.skipped


class Small(nn.Module):
    """Functions, layers, a tied input, an in-place operation, indices, a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.linear(x)))
        scores = (y @ y.transpose(-1, -2)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
        mixed = F.softmax(scores, -1) @ y
        mixed = mixed * mixed
        return mixed.add_(1.0)[:, torch.tensor([0, 2, 2])]


def small_record(folder: Path, **settings: object) -> Path:
    torch.manual_seed(0)
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **settings))  # type: ignore[arg-type]
    model, x = Small(), torch.randn(2, 5, 16)
    recorder.start(model)
    model(x).square().mean().backward()
    recorder.stop()
    recorder.step()
    return folder / "step0"


@pytest.mark.parametrize(
    "settings", [{"task": "tensor", "level": "mix"}, {"level": "mix"}, {"task": "tensor"}], ids=str
)
def test_a_clean_step_has_no_finding(settings: dict[str, str], tmp_path: Path) -> None:
    checks, skipped = checked(small_record(tmp_path, **settings))
    assert [check.text for check in checks if check.wrong] == []
    labels = {check.label for check in checks}
    if "level" in settings:
        assert {skip.label: skip.reason for skip in skipped}["Functional.dropout"] == "random"
        assert labels >= {
            "Functional.linear",
            "Functional.layer_norm",
            "Functional.softmax",
            "Tensor.__matmul__",
        }
        assert {"forward", "backward"} <= {check.direction for check in checks}
    else:
        assert labels == {"layer Linear", "layer LayerNorm"}


def test_a_clean_step_of_gpt2_has_no_finding(tmp_path: Path) -> None:
    checks, _ = checked(record(tmp_path, ours(), **STATISTICS))
    assert len(checks) > 200
    assert [check.text for check in checks if check.wrong] == []


def test_a_step_under_autocast_has_no_finding(tmp_path: Path) -> None:
    around = torch.autocast("cpu", dtype=torch.bfloat16)
    checks, _ = checked(record(tmp_path, ours(), around=around, **TENSORS))
    assert [check.text for check in checks if check.wrong] == []
    assert {"bfloat16", "float32"} <= {check.dtype for check in checks}


def test_recorded_results_are_checked_besides_the_device(tmp_path: Path) -> None:
    checks, _ = checked(small_record(tmp_path, task="tensor", level="mix"))
    linear = [check for check in checks if check.label == "Functional.linear"]
    assert {"recorded", "device"} <= {check.how for check in linear}
    assert {check.values for check in linear if check.how == "device"} == {"recorded"}


def test_a_layer_with_another_forward_is_found_without_a_second_run(tmp_path: Path) -> None:
    """nn.GELU whose forward computes the other GELU: the functions within are right, the layer is not."""

    class Wrong(nn.GELU):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x, approximate="tanh")

    Wrong.__module__, Wrong.__qualname__ = nn.GELU.__module__, "GELU"
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), task="tensor", level="mix"))
    model = nn.Sequential(nn.Linear(8, 64), Wrong())
    recorder.start(model)
    model(torch.randn(4, 8)).sum().backward()
    recorder.stop()
    recorder.step()
    checks, _ = checked(tmp_path / "step0")
    assert {check.label for check in checks if check.wrong} == {"layer GELU"}


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_of_a_large_call_the_first_rows_are_checked(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_record(tmp_path, level="L1", task=task)
    whole, none = {check.label for check in checked(path)[0]}, "large: over 400 elements"
    monkeypatch.setattr("numerics.oracle.record.LARGEST", 400)
    checks, skipped = checked(path)
    assert [check.text for check in checks if check.wrong] == []
    assert whole - {check.label for check in checks} == {
        skip.label for skip in skipped if skip.reason == none
    }
    linear = [check for check in checks if check.label == "Functional.linear" and check.how == "device"]
    assert (linear[0].measured.elements, linear[0].values) == (
        80,
        "recorded" if task == "tensor" else "generated",
    )
    recorded = {check.label for check in checks if check.how == "recorded"}
    assert ("Functional.linear" in recorded) == (task == "tensor")


def test_a_folder_without_a_record_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=r"has no dump\.json; fix:"):
        list(operations(tmp_path))


# -- generated values


def test_missing_files_of_recorded_values_are_counted(tmp_path: Path) -> None:
    place = small_record(tmp_path, task="tensor", level="mix")
    whole = check_all(operations(place), "whole")
    shutil.rmtree(place / "rank0" / "dump_tensor_data")
    report = check_all(operations(place), "without values")
    assert len(report.recorded) == len(whole.recorded)
    text = render_terminal(report_document(report))
    assert "runs of checked operations skipped: on recorded values, whose files are missing" in text
    assert LOST not in render_terminal(report_document(whole))


def test_generated_numbers_have_the_recorded_shape_dtype_and_statistics() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = (torch.randn(40, 50) * 3 + 2).to(dtype)
        wide = tensor.double()
        recorded = Value(
            "torch.Tensor", str(dtype), (40, 50), float(wide.max()), float(wide.min()), float(wide.mean()),
            float(wide.norm()),
        )  # fmt: skip
        made = generated(recorded, "a")
        assert (made.shape, made.dtype) == (tensor.shape, dtype)
        assert (float(made.max()), float(made.min())) == (recorded.highest, recorded.lowest)
        assert float(made.double().mean()) == pytest.approx(recorded.mean, abs=0.3)
        assert float(made.double().norm()) == pytest.approx(recorded.norm, rel=0.05)
        assert torch.equal(made, generated(recorded, "a"))
        assert not torch.equal(made, generated(recorded, "b"))


def test_generated_integers_truth_values_and_masks() -> None:
    indices = generated(Value("torch.Tensor", "torch.int64", (6, 7), 9.0, 3.0), "i")
    assert (int(indices.min()), int(indices.max()), indices.dtype) == (3, 9, torch.int64)
    mask = generated(Value("torch.Tensor", "torch.bool", (5, 5), 1.0, 0.0), "m")
    assert torch.equal(mask, torch.ones(5, 5).tril().bool())
    assert generated(Value("torch.Tensor", "torch.bool", (5, 5), 1.0, 1.0), "m").all()
    additive = generated(
        Value("torch.Tensor", "torch.float32", (2, 4, 4), 0.0, -math.inf, nan_count=0, inf_count=12), "s"
    )
    assert torch.equal(additive, torch.full((2, 4, 4), -math.inf).triu(1))
    bad = generated(
        Value("torch.Tensor", "torch.float32", (9,), 1.0, -1.0, 0.0, 1.0, nan_count=2, inf_count=1), "n"
    )
    assert (int(bad.isnan().sum()), int(bad.isinf().sum())) == (2, 1)
    assert generated(Value("torch.Tensor", "torch.float32", (3, 0)), "e").numel() == 0


# -- masks and extremes


def attention(mask: Tensor, tokens: int = 8) -> Operation:
    q, k, v = torch.randn(3, 1, 2, tokens, 4)
    function = F.scaled_dot_product_attention
    return Operation("a", "Functional.scaled_dot_product_attention", function, [q, k, v], {"attn_mask": mask})


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_read_with_other_rows_is_found_and_correct_masks_are_not(dtype: torch.dtype) -> None:
    def cast(mask: Tensor) -> Tensor:
        return mask if dtype == torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)

    for length in (9, 11, 30):
        packed = torch.ones(length, length, dtype=torch.bool).tril()
        assert causal_row_length(packed) == length
        misread = packed.flatten()[:64].view(8, 8)
        assert f"rows of {length} elements, read with rows of 8" in misread_mask(attention(cast(misread)))
        assert "the scores have [8, 8]" in misread_mask(attention(cast(packed)))
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    padded, window = causal.clone(), causal.triu(-2)
    padded[:, 6:] = False
    for right in (
        causal,
        padded,
        window,
        torch.ones(8, 8, dtype=torch.bool),
        torch.ones(1, 8, dtype=torch.bool),
    ):
        assert misread_mask(attention(cast(right))) == ""


@pytest.mark.parametrize("flushed", ["results", "inputs"])
def test_flushing_subnormals_is_a_note(flushed: str) -> None:
    tiny = torch.finfo(torch.float32).tiny

    def flush(x: Tensor) -> Tensor:
        return torch.where(x.abs() < tiny, 0.0, x)

    def device(x: Tensor) -> Tensor:
        return flush(x * 3) if flushed == "results" else flush(x) * 3

    oracle = Oracle(torch.device("cpu"))
    operation = Operation("scale", "scale", device, [torch.randn(30)], reference=lambda x: x * 3)
    found = {check.how: check for check in extreme_checks(operation, oracle.run)}
    assert (found["subnormal"].verdict, found["zeros"].verdict) == ("note", "exact")
    assert "flushed to zero" in found["subnormal"].remark


def test_an_overflow_inside_is_found() -> None:
    """sqrt(sum x^2) without a scale overflows in float16, where float64 rounded to float16 does not."""
    x = torch.randn(4, 500).half()
    operation = Operation(
        "n",
        "n",
        lambda x: (x * x).sum(-1).sqrt(),
        [x * 40],
        reference=lambda x: torch.linalg.vector_norm(x, dim=-1),
    )
    oracle = Oracle(torch.device("cpu"), extremes=False)
    assert "infinite where float64 has" in oracle.check(operation)[0].measured.why


def test_the_device_runs_within_the_given_context() -> None:
    entered = []

    @contextlib.contextmanager
    def around():  # type: ignore[no-untyped-def]
        entered.append(1)
        yield

    operation = Operation("g", "g", F.gelu, [torch.randn(5)])
    Oracle(torch.device("cpu"), around, extremes=False).check(operation)
    assert entered == [1, 1]  # a second run finds random operations
    assert random_gradients(operation) is not None

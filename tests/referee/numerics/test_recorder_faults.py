"""A recorder ends no step: unusual modules, values, errors and folders. What it could not record, the record says."""

import dataclasses
import itertools
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from referee.__main__ import main
from referee.numerics import NumericsError, Recorder, RecorderConfig
from referee.numerics.record.function_calls import SEVERAL, WITHIN_CHECKPOINT
from referee.numerics.record.tensor_statistics import describe_tensor, resolve


def content(folder: Path, step: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"step{step}/rank0/dump.json").read_text())
    return found


def recorded(folder: Path, model: Any, step: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **({"level": "mix"} | settings)))
    recorder.start(model)
    step()
    recorder.stop()
    recorder.step()
    return content(folder)


@dataclasses.dataclass
class Output:
    value: Tensor
    label: str = "x"


class Returning(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


VALUES = {
    "empty": torch.ones(0, 3),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([3 + 4j]),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "sparse": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(),
    "meta": torch.ones(3, device="meta"),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.ones(1).expand(3, 3),
    "uint16": torch.ones(2, dtype=torch.uint16),
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex32": torch.ones(2, dtype=torch.complex64).to(torch.complex32),
    "int4": torch.empty(2, dtype=torch.int4),
}
MAXIMA = {
    "bool": True,
    "complex": 5.0,
    "float8": 1.0,
    "sparse": 1.0,
    "csr": 1.0,
    "transposed": 5.0,
    "expanded": 1.0,
}
UNKNOWN = ("int4",)  # torch has no reduction of these


class Hostile:
    """An object whose attributes fail."""

    __dataclass_fields__ = ("missing",)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda x: {"a": x * 2, "b": None, "c": [x, (x,)]},
            lambda found: found[0]["c"][1][0]["shape"] == [2],
        ),
        (lambda x: Output(x * 2), lambda found: found[0]["value"]["Max"] == 2.0),
        (lambda x: None, lambda found: found == [None]),
        (lambda x: (x, 3), lambda found: found[1] == {"type": "int", "value": 3}),
        (lambda x: Hostile(), lambda found: "AttributeError" in found[0]["not_described"]),
    ],
    ids=["dict", "dataclass", "none", "tuple", "hostile"],
)
def test_what_a_module_without_parameters_returns_is_described(
    make: Callable[[Tensor], Any], expected: Callable[[Any], bool], tmp_path: Path
) -> None:
    model = Returning(make)
    data = recorded(tmp_path, model, lambda: model(torch.ones(2)))["data"]
    assert expected(data["Module.Returning.forward.0"]["output"])


@pytest.mark.parametrize(("name", "task"), itertools.product(VALUES, ("statistics", "tensor")))
def test_every_kind_of_tensor_is_recorded_or_named(name: str, task: str, tmp_path: Path) -> None:
    model, value = Returning(lambda x: x), VALUES[name]
    found = recorded(tmp_path, model, lambda: model(value), task=task, summary_mode="md5")
    entry = found["data"]["Module.Returning.forward.0"]["output"][0]
    assert ("not_described" in entry) == (name in UNKNOWN)
    assert entry["Max"] == MAXIMA.get(name, entry["Max"])
    if task == "tensor" and name not in UNKNOWN and name not in ("meta", "nested"):
        saved = torch.load(tmp_path / "step0/rank0/dump_tensor_data" / entry["data_name"], weights_only=True)
        assert list(saved.shape) == entry["shape"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        y: Tensor = self.layer(x)
        if fail:
            raise ValueError("broken\nin two lines")
        return y


def test_an_error_in_a_forward_is_named_and_the_next_call_has_its_own_parent(tmp_path: Path) -> None:
    model = nn.ModuleDict({"first": Inner(), "second": Inner()})
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), level="L0"))
    recorder.start(model)
    with pytest.raises(ValueError, match="broken"):
        model["first"](torch.ones(1, 4), fail=True)
    try:
        raise KeyError
    except KeyError:
        model["second"](torch.ones(1, 4))  # inside a handler, without an error of its own
    recorder.stop()
    recorder.step()
    found = content(tmp_path)
    assert found["notes"] == [
        "Module.first.Inner.forward.0 raised ValueError: broken; this record is not complete"
    ]
    assert "output" not in found["data"]["Module.first.Inner.forward.0"]
    assert "output" in found["data"]["Module.second.Inner.forward.0"]
    parents = json.loads((tmp_path / "step0/rank0/construct.json").read_text())
    assert parents["Module.second.Inner.forward.0"] is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_leave_no_call_open(reentrant: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def step() -> None:
        for _ in range(2):
            x = torch.ones(2, 4, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    found = recorded(tmp_path, model, step)
    names = [name for name in found["data"] if name.startswith("Module.1.GELU.forward")]
    assert names == ["Module.1.GELU.forward.0", "Module.1.GELU.forward.1"]
    assert found["notes"] == ([WITHIN_CHECKPOINT] if reentrant else [])


@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_a_full_disk_is_one_line_and_the_next_step_goes_on(task: str, tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), task=task))
    recorder.start(model)
    model(torch.ones(1, 64))
    recorder.stop()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        with pytest.raises(NumericsError, match="step 0 cannot be written") as caught:
            recorder.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    recorder.start(model)
    model(torch.ones(1, 64))
    recorder.step()
    assert (recorder.iteration, len(model._forward_hooks)) == (2, 0)
    assert content(tmp_path, 1)["data"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("fault", [0.0, float("nan"), float("inf")])
def test_a_tensor_has_the_statistics_and_the_digests_of_its_values(dtype: torch.dtype, fault: float) -> None:
    value = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0)).add(0.5)
    value[1, 7] = fault if dtype is not torch.float8_e4m3fn or fault == fault else 0.0
    value = value.to(dtype)
    entry, wide = resolve(describe_tensor(value, checksums=True)), value.double()
    expected = {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": wide.norm()}
    for name, number in expected.items():
        assert entry[name] == pytest.approx(number.item(), rel=1e-5, nan_ok=True), name
    assert entry["nan_count"] == int(value.isnan().sum())
    assert entry["inf_count"] == int(value.float().isinf().sum())
    minus = torch.where(value.float() == 0, -value.float(), value.float()).to(dtype)
    assert resolve(describe_tensor(minus, checksums=True))["md5"] == entry["md5"]
    moved = resolve(describe_tensor(value.flip(0), checksums=True))
    assert (moved["md5"] != entry["md5"], moved["any_order"]) == (True, entry["any_order"])
    value[2, 3] = value[2, 4]
    changed = resolve(describe_tensor(value, checksums=True))
    assert changed["md5"] != entry["md5"]
    assert changed["any_order"] != entry["any_order"]


@pytest.mark.parametrize("twice", ["retain_graph", "second derivative"])
def test_gradients_are_of_one_backward_pass(
    twice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    recorder = Recorder(RecorderConfig(dump_path=str(tmp_path), task="tensor", level="mix"))
    recorder.start(model)
    y = model(x).sum()
    if twice == "retain_graph":
        y.backward(retain_graph=True)
        (3 * y).backward()
    else:
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.square().mean().backward()
    recorder.stop()
    recorder.step()
    folder = tmp_path / "step0" / "rank0"
    assert SEVERAL in json.loads((folder / "dump.json").read_text())["notes"]
    received, passed, output = (
        torch.load(folder / "dump_tensor_data" / f"Torch.tanh.0.{name}.0.pt")
        for name in ("backward.input", "backward.output", "forward.output")
    )
    torch.testing.assert_close(passed, received * (1 - output.square()))
    assert torch.equal(received, torch.ones(3, 4))
    assert main(["oracle", str(tmp_path / "step0"), "-o", str(tmp_path / "oracle")]) == 0
    assert "float64: rounding" in capsys.readouterr().out

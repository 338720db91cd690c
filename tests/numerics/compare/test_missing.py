"""Calls, gradients and rows of one side alone; dtypes; parameters that another module computes with."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics.__main__ import main
from numerics.compare.run import Comparison
from tests.numerics.compare.small_models import TENSORS, compared, record

MODES: list[dict[str, Any]] = [{"level": "L0"}, TENSORS]


def run(model: nn.Module) -> None:
    x = torch.linspace(-1, 2, 96).sin().view(2, 6, 8)
    torch.autograd.backward(model(x).float().square().mean())


def pair(
    folder: Path, change: Callable[[nn.Module], Any], model: Callable[[], nn.Module], mode: dict[str, Any]
) -> tuple[Path, Path]:
    """Record a changed model and the model itself."""
    torch.manual_seed(0)
    golden = model()
    torch.manual_seed(0)
    target = model()
    change(target)
    return record(folder, target, run, **mode), record(folder, golden, run, **mode)


class Around(nn.Module):
    """A layer that is called with or without a gradient."""

    cut = ""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == "no_grad":
            with torch.no_grad():
                return torch.as_tensor(self.layer(x))
        x = x.detach() if self.cut == "before" else x
        y = self.layer(x)
        return torch.as_tensor(y.detach() if self.cut == "after" else y)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Around(), nn.Tanh(), nn.Linear(8, 8))


def freeze(name: str) -> Callable[[nn.Module], Any]:
    return lambda model: model.get_submodule(name).requires_grad_(False)


def cut(where: str) -> Callable[[nn.Module], Any]:
    return lambda model: setattr(model.get_submodule("1"), "cut", where)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("change", "modules"),
    [
        (freeze("0"), {"0"}),
        (freeze("1"), {"1.layer"}),
        (freeze("3"), {"3"}),
        (cut("no_grad"), {"1"}),
        (cut("before"), {"1", "1.layer"}),
        (cut("after"), {"1"}),
    ],
)
def test_a_layer_without_a_gradient_is_named(
    change: Any, modules: set[str], swapped: bool, mode: dict[str, Any], tmp_path: Path
) -> None:
    sides = pair(tmp_path, change, layers, mode)
    found = compared(*(reversed(sides) if swapped else sides)).first
    assert found
    assert (found[1].cause, found[1].direction) == ("missing", "backward")
    assert found[1].module in modules
    assert ("golden" in found[1].why) == swapped


def damaged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a record and change its dump.json."""
    other = folder.parent / "damaged"
    shutil.copytree(folder, other)
    file = next(other.rglob("dump.json"))
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return other


def first_rows(content: dict[str, Any]) -> None:
    content["data"] = dict(list(content["data"].items())[:4])


def no_backward(content: dict[str, Any]) -> None:
    content["data"] = {name: row for name, row in content["data"].items() if "backward" not in name}


def no_forward_of_one(content: dict[str, Any]) -> None:
    content["data"] = {
        name: row for name, row in content["data"].items() if not name.startswith("Module.2.Tanh")
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("change", [first_rows, no_backward, no_forward_of_one])
def test_a_truncated_record_is_not_equal(
    change: Any, swapped: bool, counted: bool, mode: dict[str, Any], tmp_path: Path
) -> None:
    whole = record(tmp_path, layers(), run, **mode)

    def damage(content: dict[str, Any]) -> None:
        change(content)
        if not counted:
            del content["rows"]  # as in a record of msProbe

    part = damaged(whole, damage)
    found = compared(whole, part) if swapped else compared(part, whole)
    if counted or change is not no_forward_of_one:
        assert found.first
        assert found.first[1].cause == "missing"
    assert found.verdict != "equal"
    assert any("not complete" in note for note in found.notes) == counted


def test_what_the_settings_leave_out_is_a_note(tmp_path: Path) -> None:
    for settings in (
        {"level": "L0"},
        {"level": "mix", "data_mode": ("forward",)},
        {"level": "mix", "list": ("Tanh",)},
    ):
        torch.manual_seed(0)
        part = record(tmp_path, layers(), run, **settings)
        torch.manual_seed(0)
        whole = record(tmp_path, layers(), run, level="mix")
        for found in (compared(part, whole), compared(whole, part)):
            assert found.verdict == "equal", found.first
            assert any("other settings" in note for note in found.notes)


def test_an_identity_on_one_side_is_no_divergence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    sides = [nn.Sequential(one, nn.Tanh(), two), nn.Sequential(one, nn.Tanh(), two, nn.Identity())]
    for mode in MODES:
        right, wrapped = (record(tmp_path, copy.deepcopy(model), run, **mode) for model in sides)
        assert compared(wrapped, right).verdict == "rounding"
        assert compared(right, wrapped).verdict == "rounding"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swapped", [False, True])
def test_an_added_layer_is_missing_on_the_other_side(
    swapped: bool, mode: dict[str, Any], tmp_path: Path
) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule("1").append(nn.LayerNorm(8))  # type: ignore[operator]

    def model() -> nn.Sequential:
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))

    sides = pair(tmp_path, change, model, mode)
    found = compared(*(reversed(sides) if swapped else sides)).first
    assert found
    assert (found[1].cause, found[1].module, found[1].direction) == ("missing", "1.2", "forward")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.att, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.att(x, x, x, need_weights=False)[0]))


class Borrowed(nn.Module):
    """Computes with the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "layer", "cause"),
    [
        (Attention, "att.out_proj", "parameter"),
        (lambda: nn.Sequential(nn.Linear(8, 8), Borrowed()), "1.fc", "parameter"),
        (Attention, "att.out_proj", "missing"),
    ],
)
def test_a_layer_that_is_not_called_is_named(
    model: Any, layer: str, cause: str, mode: dict[str, Any], tmp_path: Path
) -> None:
    def change(model: nn.Module) -> None:
        weight: Any = model.get_submodule(layer).weight
        if cause == "missing":
            weight.requires_grad_(False)
        else:
            weight.data[2, 3] += 0.2

    found = compared(*pair(tmp_path, change, model, mode)).first
    assert found
    assert (found[1].cause, found[1].module) == (cause, layer)


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("layer", [lambda: nn.PReLU(8), lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8)])
def test_a_weight_is_named_where_functions_alone_were_recorded(layer: Any, task: str, tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            next(model[2].parameters()).view(-1)[2] += 0.2  # type: ignore[index]

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), layer(), nn.Linear(8, 8))

    torch.manual_seed(0)
    golden = model()
    target = copy.deepcopy(golden)
    change(target)
    sides = [record(tmp_path, side, run, level="L1", task=task) for side in (target, golden)]
    found = compared(*sides).first
    assert found
    assert found[1].cause == "parameter"


class Cast(nn.Module):
    enabled = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return torch.as_tensor(self.layer(x).float())


@pytest.mark.parametrize("mode", [*MODES, {"level": "mix"}, {"level": "L1", "task": "tensor"}])
def test_another_dtype_of_a_result_is_a_divergence(mode: dict[str, Any], tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule("1").enabled = True  # type: ignore[assignment]

    found = compared(*pair(tmp_path, change, lambda: nn.Sequential(nn.Linear(8, 8), Cast()), mode)).first
    assert found
    assert found[1].cause == "settings"
    assert found[1].module == ("" if mode["level"] == "L1" else "1.layer")
    assert any("bfloat16 against" in text for text in found[1].what)


class Complex(nn.Module):
    factor = 1.0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "abs":
            return (x.to(torch.complex64) * self.factor).abs()
        return torch.fft.irfft(torch.fft.rfft(x) * self.factor, n=8)


@pytest.mark.parametrize("kind", ["abs", "fft"])
@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_complex_functions_are_replayed(kind: str, factor: float, tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule("1").factor = factor  # type: ignore[assignment]

    found = compared(*pair(tmp_path, change, lambda: nn.Sequential(nn.Linear(8, 8), Complex(kind)), TENSORS))
    if factor == 1.0:
        assert found.verdict == "equal"
    else:
        assert found.first
        assert (found.first[1].cause, found.first[1].module) == ("settings", "1")
    replayed = [row.replayed for row in rows(found) if row.replayed and "__mul__" in row.name]
    assert (len(replayed) == 1) == (factor != 1.0)
    assert all(max(errors) > 1000 for errors in replayed)


def rows(found: Comparison) -> list[Any]:
    return [row for step in found.steps for row in step.rows]


def test_notes_say_what_is_not_as_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = record(tmp_path, layers(), run, **TENSORS)
    other = damaged(whole, lambda content: content.update(level="L9"))
    for file in other.rglob("*.pt"):
        file.unlink()
    next(other.rglob("construct.json")).unlink()
    later = other.rename(tmp_path / "step7")
    notes = " ".join(compared(later, whole).notes)
    assert "the values of" in notes
    assert '"level": "L9"' in notes
    assert "construct.json is missing" in notes
    assert "the steps differ: step7 of the target, step0 of the golden record" in notes
    (tmp_path / "map.json").write_text('{"1": "absent"}')
    arguments = ["compare", "-tp", str(whole), "-gp", str(whole), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--map", str(tmp_path / "map.json")]) == 1
    assert (
        'the map names "absent", which is not a module or call of the golden record'
        in capsys.readouterr().err
    )


class Repeated(nn.Module):
    """Calls its layer once or twice: at the end, before another layer, or beside it, without a use of the result."""

    def __init__(self, twice: str) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self._twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self._twice == "before":
            x = self.layer(x)
        y = self.other(x)
        if self._twice == "beside":
            self.layer(y)
        return torch.as_tensor(self.layer(y) if self._twice == "after" else y)


@pytest.mark.parametrize("mode", [*MODES, {"level": "mix"}])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("twice", ["after", "before", "beside"])
def test_a_layer_that_is_called_once_more_names_its_caller(
    twice: str, swapped: bool, mode: dict[str, Any], tmp_path: Path
) -> None:
    def change(model: nn.Module) -> None:
        model.get_submodule("1")._twice = twice  # type: ignore[assignment]

    sides = pair(
        tmp_path, change, lambda: nn.Sequential(nn.Linear(8, 8), Repeated(""), nn.Linear(8, 8)), mode
    )
    found = compared(*(reversed(sides) if swapped else sides))
    if twice == "beside":
        assert found.verdict == "rounding"
        return
    assert found.first
    assert (found.first[1].module, found.first[1].direction) == ("1", "forward")
    assert "Module.1.layer.Linear.forward.1" in " ".join([found.first[1].why, *found.first[1].what])

"""The checklist of two machines: what differs is named with its grade, and nothing else is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from referee.numerics import ConfigChecker, NumericsError
from referee.numerics.setup.checklist_rows import (
    EQUAL,
    FATAL,
    HARMLESS,
    NOT_RECORDED,
    SUSPECT,
    ChecklistRow,
)
from referee.numerics.setup.compared_checklists import HOW, compare_checklists
from referee.numerics.setup.script_settings import variable_grade
from runtime import provenance
from tests.referee.numerics.setup import packed
from tests.referee.numerics.setup.packed import pack, small_model


def differing(tmp_path: Path, change: Callable[[Any], Any]) -> list[ChecklistRow]:
    found = compare_checklists(pack(tmp_path / "a.zip"), pack(tmp_path / "b.zip", change))
    return [check for check in found if check.status != EQUAL]


def test_equal_machines_are_equal_and_give_equal_bytes(tmp_path: Path) -> None:
    a, b = pack(tmp_path / "a.zip"), pack(tmp_path / "b.zip")
    assert a.read_bytes() == b.read_bytes()
    comparison = compare_checklists(a, b)
    assert {row.status for row in comparison} == {EQUAL}
    assert {row.group for row in comparison} == set(HOW)


CHANGES: dict[tuple[str, str, str], Callable[[Any], Any]] = {
    ("model", "1.norm: eps", FATAL): lambda m: setattr(m[1].norm, "eps", 1e-3),
    ("model", "1.act: approximate", FATAL): lambda m: setattr(m[1], "act", nn.GELU(approximate="tanh")),
    ("model", "1.norm: training", SUSPECT): lambda m: m[1].norm.train(),
    ("model", "extra: class", FATAL): lambda m: m.add_module("extra", nn.Sequential(nn.Identity()).eval()),
    ("weights", "1.fc.weight: values", FATAL): lambda m: m[1].fc.weight.data[0, 3].add_(1e-6),
    ("weights", "1.fc.bias: form", FATAL): lambda m: m[1].fc.bias.requires_grad_(False),
    ("weights", "2.weight: form", FATAL): lambda m: setattr(
        m[2], "weight", nn.Parameter(m[0].weight.detach().clone())
    ),
}


@pytest.mark.parametrize("row", CHANGES)
def test_a_difference_of_the_model_is_named(tmp_path: Path, row: tuple[str, str, str]) -> None:
    found = differing(tmp_path, lambda model: (CHANGES[row](model), None)[1])
    assert row in [(check.group, check.subject, check.status) for check in found]
    names = {check.subject.split(":")[0] for check in found if check.group in ("model", "weights")}
    assert len(names) == 1


def test_wrappers_change_nothing(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    assert not [check for check in differing(tmp_path, Wrapper) if check.group != "scripts"]

    class OptimizedModule(nn.Module):  # as torch.compile does
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module.eval()

        def forward(self, x: torch.Tensor) -> Any:
            return self._orig_mod(x)

    assert not [check for check in differing(tmp_path, OptimizedModule) if check.group != "scripts"]


def test_other_inputs_of_the_first_forward_are_fatal(tmp_path: Path) -> None:
    model = small_model()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    ConfigChecker(model, [packed.__file__], output_zip_path=tmp_path / "b.zip", optimizer=optimizer)
    expected = torch.get_rng_state()
    model(torch.tensor([[0, 2]]))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), expected)  # packing draws nothing
    rows = compare_checklists(pack(tmp_path / "a.zip"), tmp_path / "b.zip")
    [found] = [row for row in rows if row.status != EQUAL]
    assert (found.group, found.subject, found.status) == ("data", "first forward, input 0", FATAL)


def test_settings_of_the_optimizer_and_its_groups_are_compared(tmp_path: Path) -> None:
    def zipped(name: str, decay: bool, beta2: float) -> Path:
        model = small_model()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1 or decay]},
            {"params": [p for p in model.parameters() if p.dim() < 2 and not decay], "weight_decay": 0.0},
        ]
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(groups[: 1 if decay else 2], betas=(0.9, beta2))
        ConfigChecker(model, output_zip_path=tmp_path / name, optimizer=optimizer)
        return tmp_path / name

    a = zipped("a.zip", False, 0.95)
    beta = compare_checklists(a, zipped("b.zip", False, 0.999))
    assert {check.subject for check in beta if check.status == FATAL} == {
        "optimizer.group0.betas",
        "optimizer.group1.betas",
    }
    decayed = compare_checklists(a, zipped("c.zip", True, 0.95))
    assert "optimizer.group0.params" in {check.subject for check in decayed if check.status == FATAL}


def test_another_number_of_random_draws_is_suspect(tmp_path: Path) -> None:
    model = small_model()
    zips = []
    for name, draws in (("a.zip", 0), ("b.zip", 1)):
        torch.manual_seed(1)
        ConfigChecker.apply_patches()
        torch.randn(draws)
        ConfigChecker(model, output_zip_path=tmp_path / name)
        zips.append(tmp_path / name)
    ConfigChecker._start = None
    found = [check for check in compare_checklists(*zips) if check.status == SUSPECT]
    assert [check.subject for check in found] == ["state of torch on the CPU"]


def test_environment_packages_scripts_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, data = tmp_path / "train.sh", tmp_path / "train.bin"
    code = tmp_path / "loop.py"

    def zipped(name: str) -> Path:
        ConfigChecker(shell_path=[str(script), str(code)], output_zip_path=tmp_path / name, data=[data])
        return tmp_path / name

    script.write_text("python loop.py --lr 1e-3 --output_dir a\n")
    code.write_text("x = f(1)\n")
    data.write_bytes(b"abc")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    a = zipped("a.zip")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("HCCL_DETERMINISTIC", "true")
    monkeypatch.setenv("NEVER_HEARD_OF", "1")
    monkeypatch.setattr(
        "referee.numerics.setup.config_checker.packages", lambda: {"torch": "0.1", "pytest": "0.1"}
    )
    script.write_text("python loop.py --lr 2e-3 --output_dir b\n")
    code.write_text("# a comment\nx = f(1)\n")
    data.write_bytes(b"abd")
    found = {
        check.subject: check for check in compare_checklists(a, zipped("b.zip")) if check.status != EQUAL
    }
    grades = {
        "NVIDIA_TF32_OVERRIDE": FATAL,
        "HCCL_DETERMINISTIC": HARMLESS,
        "torch": SUSPECT,
        "pytest": HARMLESS,
        "learning_rate": FATAL,
        "output_dir": HARMLESS,
        "train.sh": SUSPECT,
        "loop.py": SUSPECT,
        "train.bin": FATAL,
        "model": NOT_RECORDED,
    }
    assert {subject: found[subject].status for subject in grades} == grades
    assert "NEVER_HEARD_OF" not in found
    assert found["HCCL_DETERMINISTIC"].values == ("not set", "true")
    assert found["learning_rate"].values == ("0.001", "0.002")


@pytest.mark.parametrize(
    "options",
    [{"shell_path": ["absent.sh"]}, {"data": ["absent.bin"]}, {"fmk": "mindspore"}, {"shell_path": "."}],
)
def test_what_cannot_be_packed_is_an_error_and_leaves_no_zip(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(NumericsError, match="fix:"):
        ConfigChecker(output_zip_path=tmp_path / "a.zip", **options)
    assert not list(tmp_path.iterdir())


def test_the_trainers_table_of_variables_agrees() -> None:
    for name, changes in provenance.VARIABLES.items():
        expected = {provenance.FORMAT: FATAL, provenance.ORDER: HARMLESS, provenance.SETS: SUSPECT}
        expected |= {provenance.OVERFLOW: SUSPECT, provenance.SATURATION: FATAL, provenance.TIMING: SUSPECT}
        assert variable_grade(name) == expected[changes]

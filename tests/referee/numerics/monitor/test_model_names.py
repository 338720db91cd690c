"""Targets that match nothing of a model are named with near names."""

import pytest
from torch import nn

from referee.numerics.monitor.targets import ModelNames, parse_targets


@pytest.fixture
def names() -> ModelNames:
    block = nn.ModuleDict({"attention": nn.Linear(2, 2), "act": nn.GELU()})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    return ModelNames.of(nn.Sequential(model))


@pytest.mark.parametrize(
    "word",
    ["grad", "all", "grad:0.blocks", "param:0.blocks.0.attention.bias", "grad:*.attention", "actv:0.blocks.0.act",
     "actv:0.blocks.0.act.output.3", "actv_grad:*.act.output_grad.0", "attention:0.blocks.0.attention.sdpa.1",
     "all:0.blocks.0.act", "actv:input.0"],
)  # fmt: skip
def test_a_target_that_matches_has_no_problem(names: ModelNames, word: str) -> None:
    (target,) = parse_targets([word])
    assert names.problem(target) == ""


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("grad:0.blocks.0.atention", "matches no trained parameter of the model; fix: did you mean 0.blocks"),
        ("param:0.frozen", "matches no trained parameter"),
        ("grad:0.blocks.0.act", "matches no trained parameter"),
        ("actv:0.blocks.1", "matches no module of the model; fix: did you mean 0.blocks.0"),
        ("actv:0.blocks.0.act.outputs.0", "matches no module"),
        ("all:xyzxyz", "all:xyzxyz matches no module and no trained parameter of the model; fix: use a path such as 0"),
    ],
)  # fmt: skip
def test_a_target_without_a_match_is_named_with_near_names(
    names: ModelNames, word: str, message: str
) -> None:
    (target,) = parse_targets([word])
    assert message in names.problem(target)

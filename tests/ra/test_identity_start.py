"""From imported weights every attention of ra starts as the same function, or is known not to."""

import pytest
import torch

from gpt2.config.config import ModelConfig
from gpt2.config.vocabulary import BYTES
from gpt2.interop.start import StartError, start_from
from gpt2.model.init import initialise
from gpt2.model.loss import linear_cross_entropy
from gpt2.model.transformer import GPT2
from gpt2.train.step import build_model
from ra.names import built_in_variants
from ra.settings import AlternationSettings
from ra.variants import variant
from tests.imported_model import a_model

CONFIG = ModelConfig("custom", 2, 2, 16, 24, 0.0, BYTES.size, BYTES.padded)
IDS = torch.randint(0, BYTES.size, (2, 24), generator=torch.Generator().manual_seed(0))
EXACT = (
    "B",
    "RAEARLY",
    "RALATE",
    "RAALL",
    "RAALT",
    "RA:1",
    "GATED",
    "VALUERES",
    "RABETA",
    "B+AQN=mild",
    "B+LR=1e-4",
)
NEAR = {"RALEARN": 2e-3, "LENS": 2e-2, "RALEARN score": 2e-3, "RALEARN hard": 1e-6}  # of the largest logit
OTHERS = ("WINDOW", "DOUBLE", "QKNORM", "DIFFERENTIAL")  # hold the weights and are other functions
WITHOUT_PLACE = ("RMS", "ROTARY", "SWIGLU", "NOPE")  # lack parameters of GPT-2


def started(name: str, seed: int = 0) -> GPT2:
    name, _, mix = name.partition(" ")
    settings = AlternationSettings(mix or "output", 0.4 if mix == "hard" else 0.001, 100.0)
    arm = variant(name, CONFIG, settings)
    model = build_model(arm.model, arm.parts, seed)
    initialise(model, seed)
    start_from(model, dict(a_model().named_parameters()))
    return model


@torch.no_grad()
def difference(name: str) -> float:
    expected, found = a_model()(IDS), started(name).eval()(IDS)
    return float((found - expected).abs().max() / expected.abs().max())


def test_every_attention_is_in_one_of_the_tables() -> None:
    named = {name.partition("+")[0].partition(" ")[0] for name in (*EXACT, *NEAR, *OTHERS, *WITHOUT_PLACE)}
    assert named == {*built_in_variants(), "RA:1"}


@pytest.mark.parametrize("name", EXACT)
def test_these_start_as_the_same_function(name: str) -> None:
    assert difference(name) < 1e-6


@pytest.mark.parametrize("name", NEAR)
def test_these_start_near_it(name: str) -> None:
    assert difference(name) < NEAR[name]
    assert (difference(name) > 1e-6) is ("hard" not in name)


@pytest.mark.parametrize("name", OTHERS)
def test_these_do_not(name: str) -> None:
    assert difference(name) > 1e-2
    assert not any(hasattr(module, "start_at_identity") for module in started(name).modules())


@pytest.mark.parametrize("name", WITHOUT_PLACE)
def test_these_have_no_place_for_a_weight(name: str) -> None:
    with pytest.raises(StartError, match=r"\w of GPT-2 (is missing|has shape)"):
        started(name)


@pytest.mark.parametrize("name", ["RAALL", "GATED", "VALUERES", "LENS", "RALEARN", "RABETA"])
def test_a_second_start_gives_the_same_model_and_every_further_parameter_can_learn(name: str) -> None:
    model = started(name)
    before = {key: value.clone() for key, value in model.named_parameters()}
    start_from(model, dict(a_model().named_parameters()))
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
    linear_cross_entropy(model.hidden(IDS[:, :-1]), model.head, IDS[:, 1:], model.vocabulary).backward()
    further = [key for key in before if key not in dict(a_model().named_parameters())]
    gradients = {key: dict(model.named_parameters())[key].grad for key in further}
    at_zero = {key for key in further if name == "RABETA" and not key.endswith("logit")}  # behind beta = 0
    assert all(
        value is not None and bool(value.abs().max() > 0)
        for key, value in gradients.items()
        if key not in at_zero
    )


def test_the_seed_changes_further_parameters_alone() -> None:
    one, two = (dict(started("RABETA", seed).named_parameters()) for seed in (0, 1))
    differing = {key for key, value in one.items() if not torch.equal(value, two[key])}
    assert differing
    assert not differing & dict(a_model().named_parameters()).keys()

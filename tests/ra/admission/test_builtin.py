"""The built-in variants pass the same examination as a user's, eager and compiled."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ra.admission.causality import future_leak
from ra.admission.examine import CHECKS, examine
from ra.admission.probe import Probe, inputs, row_rounding
from ra.admission.results import OUTSIDE
from ra.arms import LEARNED, PATTERNS, published_variants
from runtime.settings import AlternationSettings, ModelConfig
from tests.pins.admission import hold_to_pin

STUDY = ModelConfig("test", 3, 2, 32, 160, 0.0)
SHALLOW = ModelConfig(
    "test", 2, 2, 32, 160, 0.0
)  # of what differs between the first layer and the others alone
OUTPUT = AlternationSettings("output", 0.3, 100.0)
MIXES = {
    "output": OUTPUT,
    "output, recomputed": AlternationSettings("output", 0.3, 100.0, recompute=True),
    "score": AlternationSettings("score", 0.3, 100.0),
    "hard": AlternationSettings("hard", 0.6, 100.0),
    "hard, recomputed": AlternationSettings("hard", 0.4, 100.0, recompute=True),
    "hard, every 8": AlternationSettings("hard", 0.6, 100.0, gate_every=8),
}
FIXED = [*(name for name in PATTERNS if name != LEARNED), "RA:1-2", *published_variants()]

COMBINED = [
    "B+NORM=rms+POSITION=rotary+MLP=swiglu",
    "RALEARN+POSITION=rotary",
    "VALUERES+NORM=rms",
    "QKNORM+POSITION=rotary",
    "DIFFERENTIAL+POSITION=rotary",
    "B+WIDTH=match:GATED",
]


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "mix"), [*((name, "output") for name in (*FIXED, *COMBINED)), *((LEARNED, mix) for mix in MIXES)]
)
def test_a_built_in_variant_is_admitted(name: str, mix: str) -> None:
    study = STUDY if name.startswith("RA") and name != LEARNED else SHALLOW
    found = examine(Probe(name, study, MIXES[mix], autocast=True))
    hold_to_pin(found)
    assert found.violations == ()
    assert [outcome.check for outcome in found.outcomes] == [*CHECKS, OUTSIDE]
    assert {outcome.result for outcome in found.outcomes} == {"passed"}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("name", "mix"),
    [("RAALT", "output"), (LEARNED, "output, recomputed"), (LEARNED, "score"), (LEARNED, "hard, every 8")],
)
def test_a_compiled_variant_is_causal(name: str, mix: str) -> None:
    probe = Probe(name, STUDY, MIXES[mix])
    for _, module in probe.parts("perturbed", torch.float32)[1:2]:
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for iteration in (0, 1) if "every" in mix else (0,):
            if hasattr(module, "begin_step"):
                module.begin_step(iteration)

            def output(x_BTC: Tensor) -> Tensor:
                return compiled(x_BTC).detach()  # noqa: B023

            leaks = future_leak(output, inputs(2, 33, 32, torch.float32), [1, 16, 32])
            assert max(leak.size for leak in leaks) <= row_rounding(torch.float32, 33)

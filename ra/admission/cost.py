"""Count a variant's parameters, FLOPs, attention calls and memory beside the baseline's, and the widths that match."""

from __future__ import annotations

from gpt2.config.config import ModelConfig
from gpt2.memory.prediction import predict
from gpt2.memory.workload import StepWorkload
from gpt2.model.transformer import ModelParts
from ra.admission.probe import OPTIMIZER
from ra.admission.results import Cost, Costs
from ra.arms import BASELINE, parse_arm
from ra.counts import count, matched_width
from ra.settings import AlternationSettings
from ra.variants import Variant, variant


def costs(name: str, model: ModelConfig, alternation: AlternationSettings) -> Costs:
    """Measure the variant and the baseline at the study's shape, without allocating the model."""

    def parts(sizes: ModelConfig) -> ModelParts:
        return variant(parse_arm(name).parts_name, sizes, alternation).parts

    ours, base = (_cost(variant(each, model, alternation)) for each in (name, BASELINE))
    return Costs(
        ours,
        base,
        width_equal_parameters=matched_width(model, parts, "match", base.parameters),
        width_equal_flops=matched_width(model, parts, "flops", base.flops_per_token),
    )


def _cost(chosen: Variant) -> Cost:
    found = count(chosen.model, chosen.parts)
    try:
        work = StepWorkload(chosen.model, OPTIMIZER, chosen.parts, 1, 1, "cpu", "float32", False)
        memory = predict(work).peak_bytes
    except (Exception, SystemExit):  # the user's code may not run on tensors without memory
        memory = None
    return Cost(found.parameters, found.flops, found.calls, memory)

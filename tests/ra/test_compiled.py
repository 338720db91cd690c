"""Test the variants under torch.compile: one graph, the eager numbers, and a minimal backward."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from gpt2.initial_weights import initialise
from gpt2.training_step import build_model
from gpt2.transformer import GPT2
from ra.arms import LEARNED, published_variants
from ra.variants import variant
from runtime.settings import AlternationSettings, ModelConfig

MODEL = ModelConfig("test", 2, 2, 32, 16, 0.0, vocabulary=101, padded_vocabulary=128)
B = 4
SETTINGS = {
    "output": AlternationSettings("output", 0.3, 100.0),
    "output, recomputed": AlternationSettings("output", 0.3, 100.0, recompute=True),
    "score": AlternationSettings("score", 0.3, 100.0),
    "hard": AlternationSettings("hard", 0.6, 100.0),
    "hard, recomputed": AlternationSettings("hard", 0.6, 100.0, recompute=True),
    "hard, every 8": AlternationSettings("hard", 0.6, 100.0, gate_every=8),
}
COMBINED = ("B+NORM=rms+MLP=swiglu+POSITION=rotary", "VALUERES+NORM=rms+POSITION=rotary")
IN_COMBINED = ("RMS", "SWIGLU", "ROTARY", "VALUERES")
# in two layers RAALT has all that the other patterns have
FIXED = ["B", "RAALT", *(name for name in published_variants() if name not in IN_COMBINED)]
CASES = [(name, "output") for name in (*FIXED, *COMBINED)]
CASES += [(LEARNED, kind) for kind in SETTINGS]
CASES += [(f"{LEARNED}+POSITION=rotary", kind) for kind in ("output", "score", "hard, recomputed")]
BFLOAT16 = [*((name, "output") for name in (LEARNED, "LENS", "RABETA", *COMBINED)), (LEARNED, "score")]
DIFFERENT_LAYERS = ("RAALT", "VALUERES")  # of the others, one layer has all operations
ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model_of(name: str, kind: str, layers: int = 0) -> GPT2:
    """Build the variant's model with weights that make attention far from uniform.

    layers: 0 for as few as have all of the variant's operations.
    """
    fewest = 2 if name.partition("+")[0] in DIFFERENT_LAYERS else 1
    config = dataclasses.replace(MODEL, layers=layers or fewest)
    model = build_model(config, variant(name, config, SETTINGS[kind]).parts)
    initialise(model, 0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(20)
    return model.train()


def batch() -> Tensor:
    return torch.randint(101, (B, MODEL.block_size + 1), generator=torch.Generator().manual_seed(1))


def outcome(model: GPT2, hidden: Any, iteration: int = 0) -> dict[str, Tensor]:
    """Return the loss and the gradients of a training step by name; a fixed gate has no gradient."""
    for module in model.modules():
        if hasattr(module, "begin_step"):
            module.begin_step(iteration)
    model.zero_grad()
    ids = batch()
    logits = hidden(ids[:, :-1]) @ model.head[: model.vocabulary].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


@functools.cache
def compiled_step(
    name: str, kind: str
) -> tuple[dict[str, torch.fx.Graph], dict[str, Tensor], dict[str, Tensor]]:
    """Return the forward and backward graphs of torch.compile's partitioner, before kernel fusion.

    Also the loss and gradients of these graphs, and those of the eager model. All layers of MODEL.
    """
    graphs: dict[str, torch.fx.Graph] = {}

    def keeping(which: str) -> Any:
        def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
            assert which not in graphs
            graphs[which] = module.graph
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keeping("forward"),
        bw_compiler=keeping("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    model = model_of(name, kind, MODEL.layers)
    ours = outcome(model, torch.compile(model.hidden, fullgraph=True, backend=backend))
    return graphs, ours, outcome(model, model.hidden)


def graphs_of(name: str, kind: str) -> dict[str, torch.fx.Graph]:
    return compiled_step(name, kind)[0]


def calls(graph: torch.fx.Graph, *targets: Any) -> int:
    return sum(node.target in targets for node in graph.nodes)


def attention_calls(graph: torch.fx.Graph) -> int:
    """Count the calls of the forward attention kernel, with and without a generator's state."""
    operations = [str(each) for node in graph.nodes for each in (node.target, *node.args)]
    return sum(name.startswith("aten._scaled_dot_product") and "backward" not in name for name in operations)


RECOMPUTED = {  # attention calls that backward recomputes, per layer
    "output": 0,
    "output, recomputed": 2,
    "score": 1,
    "hard": 0,
    "hard, recomputed": 2,
}


def require_equal(
    ours: dict[str, Tensor], eager: dict[str, Tensor], relative: float, absolute: float
) -> None:
    """Compare the loss and each gradient by norm."""
    assert ours.keys() == eager.keys()
    for part, right in eager.items():
        error = (ours[part] - right).norm()
        assert error <= relative * right.norm() + absolute, (part, float(error), float(right.norm()))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_compiled_variant_is_one_graph_and_gives_the_eager_loss_and_gradients(name: str, kind: str) -> None:
    grouped = []
    if name == "B" or (name == LEARNED and kind in RECOMPUTED):
        pairs = [compiled_step(name, kind)[1:]]
    else:
        model = model_of(name, kind)
        compiled = torch.compile(model.hidden, fullgraph=True, backend="aot_eager")
        iterations = (0, 1, 8) if "every" in kind else (0,)
        pairs = [(outcome(model, compiled, n), outcome(model, model.hidden, n)) for n in iterations]
    for ours, eager in pairs:
        require_equal(ours, eager, 2e-6, 1e-9)
        grouped.append("blocks.0.attention.alternation_logit" in ours)
    assert grouped == ([True, False, True] if "every" in kind else [name.startswith(LEARNED)])


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_compiled_learned_attention_recomputes_no_matrix_product(kind: str) -> None:
    baseline, learned = graphs_of("B", "output"), graphs_of(LEARNED, kind)
    assert attention_calls(baseline["backward"]) == 0
    assert attention_calls(learned["backward"]) == RECOMPUTED[kind] * MODEL.layers
    for which in ("forward", "backward"):
        assert calls(learned[which], *PRODUCTS) == calls(baseline[which], *PRODUCTS) > 0


@pytest.mark.parametrize(("name", "kind"), BFLOAT16)
def test_a_variant_compiled_in_bfloat16_is_one_graph_and_gives_the_eager_numbers(
    name: str, kind: str
) -> None:
    model = model_of(name, kind)
    compiled = torch.compile(model.hidden, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        require_equal(outcome(model, compiled), outcome(model, model.hidden), 2e-2, 1e-6)

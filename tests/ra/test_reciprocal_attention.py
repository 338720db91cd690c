"""Compare the attentions with naive references that store T x T matrices, and test their properties."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt2 import cpu_linear
from gpt2.allocation_tracker import AllocationTracker
from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2, CausalSelfAttention, ModelParts
from ra.reciprocal_attention import (
    LearnedAttention,
    LearnedHardAttention,
    LearnedScoreAttention,
    ReciprocalAttention,
)

B, H, T, D = 2, 3, 12, 4
WIDTH = H * D
LEARNED = {"initial_probability": 0.3, "learning_rate_multiplier": 100.0}

MAKERS: dict[str, Callable[[], CausalSelfAttention]] = {
    "standard": lambda: CausalSelfAttention(WIDTH, H),
    "reciprocal": lambda: ReciprocalAttention(WIDTH, H),
    "learned": lambda: LearnedAttention(WIDTH, H, **LEARNED),
    "score": lambda: LearnedScoreAttention(WIDTH, H, **LEARNED),
    "hard": lambda: LearnedHardAttention(WIDTH, H, **LEARNED),
    "hard, between": lambda: between(LearnedHardAttention(WIDTH, H, gate_every=3, **LEARNED)),
}


def between(attention: LearnedHardAttention) -> LearnedHardAttention:
    """Build a hard attention at a step that does not update the gate."""
    attention.begin_step(1)
    return attention


def softmax_attention(scores_BHTT: Tensor, v_BHTD: Tensor) -> Tensor:
    """Compute causal attention with a T x T matrix."""
    future = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool).triu(1)
    return scores_BHTT.masked_fill(future, -math.inf).softmax(-1) @ v_BHTD


def reference(kind: str, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    swapped = k @ q.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if kind == "standard":
        return softmax_attention(scores, v)
    if kind == "reciprocal":
        return softmax_attention(swapped, v)
    if kind == "score":
        return softmax_attention((1 - p) * scores + p * swapped, v)
    gate = p if kind == "learned" else ((p > 0.5).to(p.dtype) - p).detach() + p
    return (1 - gate) * softmax_attention(scores, v) + gate * softmax_attention(swapped, v)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("logit", [-3.0, 0.4, 2.5])
def test_forward_and_gradients_equal_the_naive_reference(kind: str, logit: float) -> None:
    attention = MAKERS[kind]().double()
    initial = torch.tensor(logit, dtype=torch.float64)
    if isinstance(attention, LearnedAttention):
        attention.alternation_logit.data.copy_(initial)
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(4))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attention.attend(*inputs)
    (y * upstream).sum().backward()
    expected_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected_logit = initial.clone().requires_grad_()
    expected = reference(kind, *expected_inputs, torch.sigmoid(expected_logit))
    (expected * upstream).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    if isinstance(attention, LearnedAttention):
        assert attention.alternation_logit.grad is not None
        assert attention.alternation_logit.grad.abs() > 1e-6
        torch.testing.assert_close(
            attention.alternation_logit.grad, expected_logit.grad, rtol=1e-10, atol=1e-10
        )


def model_of(kind: str, layers: int = 2) -> GPT2:
    model = GPT2(layers=layers, heads=H, width=WIDTH, block_size=T, vocabulary=53, padded_vocabulary=64,
                parts=ModelParts(attention=lambda layer: MAKERS[kind]()))  # fmt: skip
    initialise(model, 0)
    with torch.no_grad():  # well away from uniform attention, so that a leak would show
        for block in model.blocks:
            block.attention.qkv.weight.mul_(30)
    return model


def saved_shapes(attention: nn.Module, tokens: int, width: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    x = torch.randn(1, tokens, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(x)
    return shapes


@pytest.mark.parametrize("kind", MAKERS)
def test_no_tensor_of_t_by_t_is_saved_for_backward(kind: str) -> None:
    shapes = saved_shapes(MAKERS[kind](), 512, WIDTH)
    assert shapes
    assert not [shape for shape in shapes if sum(size == 512 for size in shape) >= 2]
    assert max(math.prod(shape) for shape in shapes) <= 512 * 4 * WIDTH


@pytest.mark.parametrize("kind", ["learned", "score", "hard"])
@pytest.mark.parametrize(("logit", "fixed"), [(-200.0, "standard"), (200.0, "reciprocal")])
def test_the_learned_mix_equals_the_fixed_attentions_at_its_limits(
    kind: str, logit: float, fixed: str
) -> None:
    learned, plain = model_of(kind), model_of(fixed)
    with torch.no_grad():
        for block in learned.blocks:
            block.attention.alternation_logit.fill_(logit)
    ids = torch.randint(0, 53, (B, T))
    torch.testing.assert_close(learned(ids), plain(ids), rtol=0, atol=2e-6)


def logit_gradient(mix: Callable[..., Tensor], logit: Tensor, paths: list[Tensor], upstream: Tensor) -> float:
    logit = logit.detach().requires_grad_()
    mix(*paths, torch.sigmoid(logit)).backward(upstream)
    assert logit.grad is not None
    return float(logit.grad)


@pytest.mark.parametrize("kind", ["learned", "hard"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("distance", "cancelled"), [(1.0, 0.01), (0.1, 0.05), (0.01, 1.0)])
def test_the_logit_gradient_in_bfloat16_has_no_cancellation_error(
    kind: str, p: float, distance: float, cancelled: float
) -> None:
    """Compare with float64 on paths of relative `distance`. `cancelled`: the error of (1 - p) s + p r, at least."""
    module = MAKERS[kind]()
    assert isinstance(module, LearnedAttention)
    logit = torch.tensor(p).logit()
    errors, before = [], []
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        noise_BHTD, standard, difference = (torch.randn(2, 6, 64, 64, generator=draw) for _ in range(3))
        paths = [standard.bfloat16(), (standard + distance * difference).bfloat16()]
        upstream = (0.3 * noise_BHTD + 0.5 * standard + 0.1 * difference).bfloat16()
        exact = logit_gradient(
            lambda s, r, p: s + p * (r - s),
            logit.double(),
            [path.double() for path in paths],
            upstream.double(),
        )
        cancelling = logit_gradient(lambda s, r, p: (1 - p) * s + p * r, logit, paths, upstream)
        module.alternation_logit = nn.Parameter(logit.clone())
        module.mix(*paths).backward(upstream)
        assert module.alternation_logit.grad is not None
        errors.append(abs(float(module.alternation_logit.grad) / exact - 1))
        before.append(abs(cancelling / exact - 1))
    assert max(errors) < 0.005
    assert max(before) > cancelled


@pytest.mark.parametrize("logit", [-1.0, 1.0])
def test_a_hard_gate_without_its_gradient_runs_one_attention_call_with_the_same_values(
    logit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = LearnedHardAttention(WIDTH, H, gate_every=4, **LEARNED).double()
    for parameter in attention.parameters():
        parameter.data.normal_()
    attention.alternation_logit.data.fill_(logit)
    calls = []
    fused = CausalSelfAttention.fused
    monkeypatch.setattr(CausalSelfAttention, "fused", lambda *a, **k: calls.append(1) or fused(*a, **k))
    x = torch.randn(B, T, WIDTH, dtype=torch.float64)
    steps = {}
    for iteration in range(5):
        attention.zero_grad()
        attention.begin_step(iteration)
        calls.clear()
        y = attention(x)
        (y**2).sum().backward()
        steps[iteration] = (
            len(calls),
            y.detach(),
            attention.qkv.weight.grad.clone(),
            attention.alternation_logit.grad,
        )
    assert [steps[k][0] for k in range(5)] == [2, 1, 1, 1, 2]
    assert [steps[k][3] is None for k in range(5)] == [False, True, True, True, False]
    for k in range(1, 5):
        torch.testing.assert_close(steps[k][1], steps[0][1], rtol=0, atol=1e-12)
        torch.testing.assert_close(steps[k][2], steps[0][2], rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="at least 1"):
        LearnedHardAttention(WIDTH, H, gate_every=0, **LEARNED)


@pytest.mark.parametrize("kind", [LearnedAttention, LearnedHardAttention])
@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_gives_bitwise_the_same_gradients(kind: type, recompute: bool) -> None:
    attention = kind(WIDTH, H, **LEARNED, recompute=cpu_linear)
    for name, parameter in attention.named_parameters():
        if parameter.dim():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    x = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(0))
    gradients = []
    for forward in (attention, lambda x: attention.merge(attention.attend(*attention.project(x)))):
        attention.zero_grad()
        leaf = x.clone().requires_grad_()
        (forward(leaf) ** 2).sum().backward()
        gradients.append([leaf.grad, *(parameter.grad for parameter in attention.parameters())])
    for ours, plain in zip(*gradients, strict=True):
        assert torch.equal(ours, plain)


def kept_bytes(attention: nn.Module) -> int:
    """Count the bytes stored for backward, each storage once, without weights, input and output."""
    tracker = AllocationTracker()
    with tracker:
        x = torch.randn(B, 128, WIDTH, requires_grad=True)
        tracker.mark("other", [x, *attention.parameters()])
        with tracker.phase("forward"):
            y = attention(x)
        timeline = tracker.timeline()
        kinds = timeline.by_kind(timeline.events)
    return kinds["activations"] - y.numel() * y.element_size()


def test_learned_attention_saves_at_most_two_outputs_a_layer_more_than_standard_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_linear, "MOST_SAVED", 0)
    output = B * 128 * WIDTH * 4
    statistics = B * 128 * H * 4
    standard = kept_bytes(CausalSelfAttention(WIDTH, H))
    assert kept_bytes(LearnedAttention(WIDTH, H, **LEARNED)) <= standard + output + statistics + 64
    assert kept_bytes(LearnedHardAttention(WIDTH, H, **LEARNED)) <= standard + output + statistics + 64
    for recomputing in (
        LearnedAttention(WIDTH, H, **LEARNED, recompute=True),
        LearnedScoreAttention(WIDTH, H, **LEARNED),
    ):
        assert kept_bytes(recomputing) < standard

"""Sampling with a cache gives the numbers of sampling without, for every attention; logp_diff finds a faulty cache."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpt2.initial_weights import initialise
from gpt2.sampling import Cache, CacheError, Drawing, logits, response_log_probs, sample
from gpt2.transformer import GPT2, CausalSelfAttention, ModelParts
from ra.reciprocal_attention import (
    LearnedAttention,
    LearnedHardAttention,
    LearnedScoreAttention,
    ReciprocalAttention,
)
from referee.numerics import logp_diff

WIDTH, HEADS, VOCABULARY = 32, 4, 53
LEARNED = {"initial_probability": 0.3, "learning_rate_multiplier": 1.0}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "standard": lambda: CausalSelfAttention(WIDTH, HEADS),
    "reciprocal": lambda: ReciprocalAttention(WIDTH, HEADS),
    "output mix": lambda: LearnedAttention(WIDTH, HEADS, **LEARNED),
    "recomputed mix": lambda: LearnedAttention(WIDTH, HEADS, recompute=True, **LEARNED),
    "score mix": lambda: LearnedScoreAttention(WIDTH, HEADS, **LEARNED),
    "hard gate": lambda: LearnedHardAttention(WIDTH, HEADS, gate_every=2, **LEARNED),
    "hard gate, reciprocal": lambda: LearnedHardAttention(
        WIDTH, HEADS, **LEARNED | {"initial_probability": 0.8}
    ),
}


def model_of(kind: Callable[[], nn.Module], dropout: float = 0.0) -> GPT2:
    """A model whose weights are large enough that attention decides the logits."""
    model = GPT2(
        layers=2, heads=HEADS, width=WIDTH, block_size=24, vocabulary=VOCABULARY, padded_vocabulary=64,
        dropout=dropout, parts=ModelParts(attention=lambda layer: kind()),
    )  # fmt: skip
    initialise(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(8 if "qkv" in name else 4)
    return model.eval()


MODELS = {name: model_of(kind) for name, kind in KINDS.items()}


def rounding(expected: Tensor) -> float:
    """The bound of both paths' rounding: 100 times float32's epsilon of the largest logit."""
    return 100 * torch.finfo(torch.float32).eps * float(expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@given(cuts=st.sets(st.integers(1, 23)), seed=st.integers(0, 99), batch=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_any_split_of_a_sequence_gives_the_logits_of_one_pass(
    kind: str, cuts: set[int], seed: int, batch: int
) -> None:
    model = MODELS[kind]
    ids = torch.randint(0, VOCABULARY, (batch, 24), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(ids)
    cache, edges = Cache(), [0, *sorted(cuts), 24]
    parts = [logits(model, ids[:, a:b], cache) for a, b in itertools.pairwise(edges)]
    assert (torch.cat(parts, dim=1) - expected).abs().max() < rounding(expected)
    assert cache.length == 24


def rollout(kind: str, cache: Cache | None, prompts: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Sample after several prompts one after the other. Returns both log-probabilities and the tokens."""
    model = MODELS[kind]
    sampled, trained, tokens = [], [], []
    for number in range(prompts):
        prompt = torch.randint(0, VOCABULARY, (1, 4), generator=torch.Generator().manual_seed(number))
        if cache is not None:
            cache.clear()
        found = sample(model, prompt, 8, [torch.Generator().manual_seed(number)], cache)
        sampled.append(found.log_probs)
        tokens.append(found.tokens)
        trained.append(response_log_probs(model, prompt, found.tokens))
    return torch.cat(sampled), torch.cat(trained), torch.cat(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_with_and_without_a_cache_agree_token_by_token(kind: str) -> None:
    cached, trained, tokens = rollout(kind, Cache())
    uncached, _, expected = rollout(kind, None)
    assert torch.equal(tokens, expected)
    for other in (trained, uncached):
        found = logp_diff(cached, other, threshold=1e-4)
        assert found.verdict == "within the threshold"
    assert trained.std() > 0.3  # the tokens are not equally probable


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_draws_what_each_of_its_prompts_draws_alone(kind: str) -> None:
    model, prompts = (
        MODELS[kind],
        torch.randint(0, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(5)),
    )
    seeds = (7, 8, 9)

    def drawn(prompt: Tensor, *seeds: int) -> Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return sample(model, prompt, 12, generators, Cache(), Drawing(0.8, 20, 0.95)).tokens

    together = drawn(prompts, *seeds)
    alone = [drawn(prompt[None], seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert torch.equal(together, torch.cat(alone))


@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_probabilities_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_BV = 3 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    expected = TemperatureLogitsWarper(temperature)(None, logits_BV)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    found = Drawing(temperature, top_k, top_p).probabilities(logits_BV)
    close = (found - expected.softmax(-1)).abs().amax(-1) < 1e-5
    # where the sum of the kept tokens equals top_p to rounding, either side may keep one token more
    sums = (logits_BV / temperature).softmax(-1).sort(descending=True).values.cumsum(-1)
    at_the_edge = ((sums - top_p).abs() < 1e-5).any(-1)
    assert bool((close | at_the_edge).all())


def test_temperature_0_takes_the_most_probable_token_and_bad_values_are_errors() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    assert torch.equal(Drawing(0.0).probabilities(logits_BV), torch.tensor([[0.0, 1, 0], [1, 0, 0]]))
    for bad in ((-1.0, 0, 1.0), (float("nan"), 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.1)):
        with pytest.raises(ValueError, match="fix"):
            Drawing(*bad)


class Uncleared(Cache):
    """The fault: positions start at 0, the rows of the sequence before stay."""

    def clear(self) -> None:
        self.length = 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_not_cleared_is_found_at_the_second_sequence(kind: str) -> None:
    cached, trained, _ = rollout(kind, Uncleared())
    found = logp_diff(cached, trained)
    assert found.verdict != "within the threshold"
    assert next(iter(found.over.items())) == (1, 0)
    assert abs(found.first_token) > 0.01


def test_an_attention_that_cannot_be_cached_is_named() -> None:
    class Linear(CausalSelfAttention):
        def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
            return v_BHTD.cumsum(2)

    class Other(nn.Linear):
        pass

    model, cache = model_of(lambda: Linear(WIDTH, HEADS)), Cache()
    logits(model, torch.zeros(1, 3, dtype=torch.int64), cache)
    with pytest.raises(CacheError, match="Linear mixes values outside"):
        logits(model, torch.zeros(1, 1, dtype=torch.int64), cache)
    with pytest.raises(CacheError, match="Other is not a CausalSelfAttention"):
        logits(model_of(lambda: Other(WIDTH, WIDTH)), torch.zeros(1, 3, dtype=torch.int64), Cache())

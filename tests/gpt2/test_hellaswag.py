"""HellaSwag's scores against a second implementation, item by item; an oracle, an adversary, a broken model."""

import contextlib
import json
import math
import random

import pytest
import torch
from torch import Tensor, nn

from gpt2 import hellaswag, tokenizer, validation
from gpt2.hellaswag import HellaSwag, HellaSwagError, Item
from gpt2.initial_weights import initialise
from gpt2.tokenizer import Tokenizer
from gpt2.transformer import GPT2
from tests.hellaswag_items import FIXTURE, REAL, real_items
from tests.published import published

REAL_ITEMS = 400


FOLDED = 509  # tokens that a small model knows


class Folded:
    """GPT-2's tokens, each as its remainder: as many and in the same places, for a model with few logits."""

    def __init__(self, encoding: Tokenizer) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> list[int]:
        return [token % FOLDED for token in self.encoding.encode(text)]


@pytest.fixture(scope="module", params=sorted(tokenizer.ALL))
def encoding(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer.load(request.param)


@pytest.fixture(scope="module")
def model(encoding: Tokenizer) -> GPT2:
    return telling_model(encoding.eot + 1)


def telling_model(vocabulary: int) -> GPT2:
    """One narrow layer with weights large enough that the endings differ clearly."""
    model = GPT2(
        layers=1,
        heads=2,
        width=32,
        block_size=256,
        vocabulary=vocabulary,
        padded_vocabulary=-(-vocabulary // 64) * 64,
    )
    initialise(model, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model.double()


def score(model: nn.Module, items: list[Item], encoding: Tokenizer | Folded, **changes) -> HellaSwag:
    settings = {"batch_tokens": 2048, "block_size": 256, "device": "cpu", "autocast": contextlib.nullcontext}
    return hellaswag.score(model, items, encoding, **(settings | changes))


# --- the scores against a plain reference


def reference_texts(line: str) -> tuple[str, list[str], int]:
    """Query, endings and label, worked out from the raw line by other means than the module's."""
    raw = json.loads(line)

    def clean(text: str) -> str:
        text = ". ".join(text.strip().split(" [title]"))
        saved, inside = [], False
        for place, sign in enumerate(text):
            if not inside and sign == "[" and "]" in text[place:]:
                inside = True
            if not inside:
                saved.append(sign)
            if inside and sign == "]":
                inside = False
        return " ".join("".join(saved).split("  "))

    second = raw["ctx_b"][:1].upper() + raw["ctx_b"][1:].lower()
    query = clean(f"{raw['activity_label']}: {raw['ctx_a']} {second}")
    return query, [clean(ending) for ending in raw["endings"]], int(raw["label"])


def reference_log_likelihood(
    model: GPT2, encoding: Tokenizer | Folded, query: str, ending: str, block_size: int
) -> float:
    """One ending, no batch, all logits: the sum of log p over the tokens after those of the bare query."""
    whole = encoding.encode(f"{query} {ending}")
    start = len(encoding.encode(query.rstrip(" ")))
    cut = max(0, len(whole) - block_size - 1)
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([whole[cut:-1]]))[0], dim=-1)
    return sum(
        log_p[place - cut - 1, whole[place]].item() for place in range(max(start, cut + 1), len(whole))
    )


def check_against_the_reference(model, encoding, lines: list[str], block_size: int, found: HellaSwag) -> None:
    assert found.items == len(lines)
    hits = hits_norm = 0
    for line, values, choice, choice_norm in zip(
        lines, found.log_likelihoods, found.choices, found.choices_norm, strict=True
    ):
        query, endings, label = reference_texts(line)
        expected = [reference_log_likelihood(model, encoding, query, e, block_size) for e in endings]
        assert values == pytest.approx(expected, abs=1e-9)
        normed = [value / len(ending) for value, ending in zip(expected, endings, strict=True)]
        assert choice == expected.index(max(expected))
        assert choice_norm == normed.index(max(normed))
        hits += choice == label
        hits_norm += choice_norm == label
    labels = [reference_texts(line)[2] for line in lines]
    assert found.correct == [choice == label for choice, label in zip(found.choices, labels, strict=True)]
    assert found.correct_norm == [
        choice == label for choice, label in zip(found.choices_norm, labels, strict=True)
    ]
    assert found.acc == hits / len(lines)
    assert found.acc_norm == hits_norm / len(lines)


@pytest.mark.parametrize("block_size", [256, 9])
def test_fixture_scores_equal_an_unbatched_reference(model: GPT2, encoding, block_size: int) -> None:
    found = score(model, hellaswag.load_items(FIXTURE, 0), encoding, block_size=block_size)
    lines = FIXTURE.read_text(encoding="utf-8").splitlines()
    check_against_the_reference(model, encoding, lines, block_size, found)


def test_hundreds_of_real_scores_equal_an_unbatched_reference() -> None:
    encoding = tokenizer.load("gpt2")
    items = real_items(REAL_ITEMS)
    model, folded = telling_model(FOLDED), Folded(encoding)
    found = score(model, items, folded)
    lines = published(REAL).read_text(encoding="utf-8").split("\n")[:-1]
    chosen = [lines[i * len(lines) // REAL_ITEMS] for i in range(REAL_ITEMS)]
    check_against_the_reference(model, folded, chosen, 256, found)
    for choices in (found.choices, found.choices_norm):
        shares = [choices.count(ending) / REAL_ITEMS for ending in range(4)]
        assert all(0.1 <= share <= 0.5 for share in shares), f"choices are not spread: {shares}"
    assert found.choices != found.choices_norm
    for p, stderr in ((found.acc, found.acc_stderr), (found.acc_norm, found.acc_norm_stderr)):
        assert stderr == pytest.approx(math.sqrt(p * (1 - p) / (REAL_ITEMS - 1)), rel=1e-12)


def test_length_is_counted_in_characters() -> None:
    """By bytes the second of two equally likely endings would be the longer one, and win."""
    item = Item("Q:", ("abcd", "éééé", "a", "b"), 0)
    found = hellaswag._summary([item], [[-4.0, -4.0, -3.0, -3.0]])
    assert found.choices_norm == [0]
    assert found.acc_norm == 1.0
    assert found.acc_norm_stderr is None


# --- an oracle, an adversary, a model that is broken


def test_batches_hold_every_row_once() -> None:
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(0, 30))]
        limit = draw.randint(1, 100)
        found = list(validation.batches(lengths, limit))
        assert sorted(i for b in found for i in b) == list(range(len(lengths)))
        assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in found)


def test_logits_that_are_not_finite_are_an_error(encoding) -> None:
    class Broken(nn.Module):
        def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
            return torch.full(ids_BT.shape, math.nan)

    with pytest.raises(HellaSwagError, match="contain NaN"):
        score(Broken(), hellaswag.load_items(FIXTURE, 2), encoding)


def test_a_stop_request_ends_the_scoring_and_the_mode_is_restored(model: GPT2, encoding) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        score(model, hellaswag.load_items(FIXTURE, 2), encoding, stop=stop)
    assert model.training

"""Items made from held-out text: each is answerable, no length or place gives the answer away, and all runs get equal
ones."""

import numpy as np
import pytest

from gpt2 import tokenizer
from gpt2.hellaswag import ENDINGS, ITEMS, choice_items, digest

WORDS = [
    "river",
    "stone",
    "cloud",
    "paper",
    "garden",
    "winter",
    "letter",
    "music",
    "harbour",
    "window",
    "candle",
    "forest",
]


def windows(encoding: tokenizer.Tokenizer, tokens: int, block_size: int) -> np.ndarray:
    draw = np.random.default_rng(1)
    text = " ".join(WORDS[int(index)] for index in draw.integers(len(WORDS), size=tokens))
    ids = np.array(encoding.encode(text)[:tokens], dtype=np.uint16)
    ids[:: tokens // 3] = encoding.eot  # documents end
    starts = range(0, len(ids) - block_size, block_size)
    return np.stack([ids[start : start + block_size + 1] for start in starts])


@pytest.mark.parametrize("name", sorted(tokenizer.ALL))
@pytest.mark.parametrize("block_size", [16, 128])
def test_items_continue_the_text_with_endings_of_equal_length(name: str, block_size: int) -> None:
    encoding = tokenizer.load(name)
    held_out = windows(encoding, 20_000, block_size)
    items = choice_items(held_out, encoding)
    assert not isinstance(items, str)
    assert ITEMS - 10 <= len(items) <= ITEMS
    text = tokenizer.decode(encoding, held_out[:, :-1].ravel().tolist())
    for item in items:
        assert item.query + item.endings[item.label] in text
        assert tokenizer.END_OF_TEXT not in item.query + item.endings[item.label]
        assert len(set(item.endings)) == ENDINGS
        assert len({len(ending) for ending in item.endings}) == 1
        assert (
            len(encoding.encode(item.query + max(item.endings, key=len))) <= block_size + 4
        )  # a cut word can have more
    shares = np.bincount([item.label for item in items], minlength=ENDINGS) / len(items)
    assert abs(shares - 1 / ENDINGS).max() < 0.1
    again = choice_items(held_out.copy(), encoding)
    assert not isinstance(again, str)
    assert digest(again) == digest(items)

"""Make items of HellaSwag's form from the held-out text: which of four endings continues a context?

A small model of bytes cannot read HellaSwag's items: its sequences are shorter. These items fit every model, and
`hellaswag.score` scores them.
"""

from __future__ import annotations

import numpy as np

from gpt2.data.tokenizer import Tokenizer
from gpt2.eval.hellaswag import ENDINGS, Item

ITEMS = 320  # at most; the standard error is below 3 points
CONTEXT, ENDING = 16, 8  # tokens, about


def choice_items(windows: np.ndarray, tokenizer: Tokenizer, seed: int = 0) -> list[Item] | str:
    """Return items spread over validation windows (n, T+1), or the reason why there are none.

    The true ending follows the context, also within a word. The others follow three other contexts and have as many
    characters. The result is a pure function of the arguments.
    """
    tokens = windows[:, :-1].ravel()
    width = min(CONTEXT + ENDING, windows.shape[1] - 1)
    length = max(1, width * ENDING // (CONTEXT + ENDING)) * tokenizer.bytes_per_token
    places = len(tokens) // width
    count = min(places, ITEMS)
    parts = []
    for place in (number * places // count for number in range(count)):
        piece = tokens[place * width : (place + 1) * width].tolist()
        text = tokenizer.decode_bytes(piece).decode(errors="ignore")
        if tokenizer.eot not in piece and len(text) >= 2 * length:  # an item is of one document
            parts.append((text[:-length], text[-length:]))
    if len({ending for _, ending in parts}) < ENDINGS:
        return f"the validation text of {len(tokens):,} tokens gives fewer than {ENDINGS} different endings"
    draw = np.random.default_rng(seed)
    items = []
    for context, true in parts:
        others: list[str] = []
        while len(others) < ENDINGS - 1:
            other = parts[int(draw.integers(len(parts)))][1]
            if other not in (true, *others):
                others.append(other)
        label = int(draw.integers(ENDINGS))
        items.append(Item(context, (*others[:label], true, *others[label:]), label, joint=""))
    return items

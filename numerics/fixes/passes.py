"""Passes of a fixed module, which runs more often than the unfixed one: what an observer of modules counts.

first      the forward whose results the model uses; without gradients inside
discarded  a further forward without the fix, whose results are discarded
replayed   the forward that backward repeats; the gradients inside are those of this one
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

WITHIN_CHECKPOINT = (
    "the gradients of calls within torch.utils.checkpoint with use_reentrant=True are not recorded; a difference that "
    "arises in their backward is named at the next recorded gradient; fix: use_reentrant=False"
)
UNSEEN = "it is in torch.utils.checkpoint with use_reentrant=True; fix: use_reentrant=False"
FIRST, DISCARDED, REPLAYED = "first", "discarded", "replayed"
Listener = Callable[[Any, Sequence[Any], Mapping[str, Any]], None]
LISTENERS: list[
    Listener
] = []  # called with function, args and kwargs before small operations replace the function


class _Current(threading.local):
    name = ""


_current = _Current()


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """Within the block, this thread runs such a pass."""
    before, _current.name = _current.name, name
    try:
        yield
    finally:
        _current.name = before


def counts() -> bool:
    """Whether a forward that runs now counts: it is not discarded, and backward does not recompute it."""
    return torch._C._current_graph_task_id() == -1 and _current.name != DISCARDED


def in_reentrant_checkpoint() -> bool:
    """Whether backward recomputes a checkpoint with use_reentrant=True: its gradients pass in a backward of its own."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


def first() -> bool:
    """Whether the first pass of a fixed module runs, whose tensors have no gradients."""
    return _current.name == FIRST


def replayed() -> bool:
    """Whether the pass of a fixed module runs whose tensors have gradients."""
    return _current.name == REPLAYED

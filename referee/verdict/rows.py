"""The long table of results: a row is one number of one trained model.

rows.jsonl of a run is such a table, a JSON object a line; any trainer can write one. Tests, tables and figures follow
from it: an evaluation is a metric of some data on a platform after some tokens.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec

LOSS, VALIDATION = "loss", "validation"  # the metric and the data that a verdict is on
ACCURACY, TEST = "accuracy", "test"  # those of GRPO


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of a trained model, with everything that names it."""

    study: str  # name of the study's folder
    arm: str
    seed: int
    size: str  # name of the model's size
    platform: str  # arithmetic that evaluated, such as fp32 or int4; with @machine on another machine
    data: str  # text or items: a name, and @ with the first digits of their SHA-256: validation@0f3a5c7e9b1d
    metric: str  # loss: mean nats per token; acc, accuracy: share of right items; others by their names
    tokens: int  # trained on before; of GRPO at most, as responses differ in length
    value: float
    items: int = 0  # single items behind the value; those of the last evaluation are in items/METRIC-DATA.npy

    @property
    def dataset(self) -> str:
        """The name of the data, without the digits."""
        return self.data.partition("@")[0]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return msgspec.structs.replace(self, **changes)

"""Check the first rows of a large call, where each row of the result depends on one row of the inputs."""

from __future__ import annotations

from dataclasses import dataclass

from numerics.compare.table.step_record import Call, Value

# Of these, the first argument and the results have the same rows; other arguments belong to all rows.
FIRST = "linear mkldnn._linear_pointwise gelu relu silu tanh sigmoid exp log layer_norm rms_norm embedding".split()  # noqa: SIM905
# Of these, every tensor with as many rows as the first has these rows.
ALL = "scaled_dot_product_attention softmax log_softmax add sub mul truediv cross_entropy".split()  # noqa: SIM905


@dataclass(frozen=True)
class FirstRows:
    """The rows of a call that are checked. count: None for all."""

    count: int | None
    call: Call
    name: str

    def of_input(self, value: Value) -> int | None:
        """Return how many rows of an argument are checked; None for all."""
        return self.count if _has_rows(self.name, value, self.call) else None

    def of_result(self, value: Value) -> int | None:
        """Return how many rows of a result are checked; None for all."""
        return self.count if value.shape[:1] == _first(self.call).shape[:1] else None

    def has_result(self, value: Value) -> bool:
        """Return whether a result of the rows is a part of the result of the call."""
        return self.count is None or value.shape[:1] == _first(self.call).shape[:1]


def first_rows(name: str, call: Call, size: int, largest: int) -> FirstRows | None:
    """Return the rows that have at most `largest` of the call's elements; None where there are none.

    name: of the function. size: elements of the call.
    """
    if size <= largest:
        return FirstRows(None, call, name)
    plain = name.strip("_").removeprefix("i") if name.startswith("__i") else name.strip("_")
    if call.is_module or plain not in (*FIRST, *ALL) or not _first(call).shape:
        return None
    shared = sum(value.count for value in call.inputs.values() if not _has_rows(plain, value, call))
    count = (largest - shared) * _first(call).shape[0] // max(size - shared, 1)
    return FirstRows(count, call, plain) if count > 0 else None


def _first(call: Call) -> Value:
    return next((value for value in call.inputs.values() if value.dtype), Value(""))


def _has_rows(name: str, value: Value, call: Call) -> bool:
    first = _first(call)
    if value is first:
        return True
    same = bool(value.dtype) and value.shape[:1] == first.shape[:1]
    return same and name in ALL and (len(value.shape) == len(first.shape) or name == "cross_entropy")

"""Judge the calls and gradients that one side alone has: some change nothing, the first other one is a divergence."""

from __future__ import annotations

import re
from dataclasses import replace

from referee.numerics.compare.compared_rows import UNMATCHED, CallRow
from referee.numerics.compare.read_record import StepRecord
from referee.numerics.compare.row_tree import Divergence, RowTree, key

IN_PLACE = re.compile(r"[^_]_$|__i[a-z]+__$")
ORDER = (2, 0)  # after every other divergence


def changed_selection(target: StepRecord, golden: StepRecord) -> set[str]:
    """Return the settings by which the records have other calls. A record of msProbe does not say all of them."""
    one, other = target.selection, golden.selection
    both = one.keys() & other.keys() | ((one.keys() | other.keys()) & {"construct"})
    return {name for name in both if one.get(name) != other.get(name)}


def first_of_one_side(tree: RowTree) -> Divergence | None:
    """Return the first call or gradient of one side alone that counts."""
    counted = [
        row
        for row in tree.rows
        if row.grade == UNMATCHED and is_judged(tree, row) and not _is_harmless(tree, row)
    ]
    gaps = [row for row in tree.rows if row.gaps]
    trained = any(row.pair.call.backward for row in tree.rows)
    modules = [row for row in counted if row.pair.call.is_module]
    forward = next((row for row in counted if not row.pair.call.backward), None)
    frozen = next((row for row in tree.rows if trained and row.flags), None)
    cut = next((row for row in tree.rows if row.detached and row.pair.call.is_module), None)
    if forward is not None:
        return tree.divergence(forward, "", "one side", order=ORDER)
    if frozen is not None:
        found = tree.divergence(tree.backward_of(frozen), "", "one side", frozen.flags[0], order=ORDER)
        path, dot, _ = frozen.flags[0].place.rpartition(".")
        inner = ".".join(filter(None, (found.module, path))) if dot else found.module
        return replace(found, module=inner, direction="backward")
    if not counted and not gaps:
        return None
    if cut is not None and (modules or gaps):
        found = tree.divergence(tree.backward_of(cut), "", "one side", cut.detached[0], order=ORDER)
        return replace(found, direction="backward")
    row = next(iter([*modules, *gaps, *counted]))
    return tree.divergence(row, "", "one side", next(iter(row.gaps), None), order=ORDER)


def is_judged(tree: RowTree, row: CallRow) -> bool:
    """Return whether both sides were recorded with the settings that record such a call."""
    changed = changed_selection(tree.target, tree.golden)
    if tree.target.by_msprobe != tree.golden.by_msprobe or changed - {"level", "construct"}:
        return False
    levels = {record.selection.get("level") for record in (tree.target, tree.golden)}
    return not changed or (row.pair.call.is_module and "L1" not in levels)


def caller(tree: RowTree, row: CallRow) -> CallRow | None:
    """Return the module around a call of one side alone, of a module that both sides call: it differs."""
    golden, path = row.pair.golden is not None, row.pair.call.path
    pairs = (one.pair for one in tree.rows if one.grade != UNMATCHED and one.pair.call.is_module)
    both = any(call.path == path for pair in pairs if (call := pair.golden if golden else pair.target))
    return tree.outer(row) if both and row.pair.call.is_module else None


def between_passes(tree: RowTree) -> CallRow | None:
    """Return a function of one side alone that overwrites tensors before a later forward, as clipping does."""
    for row in tree.rows:
        call, record = row.pair.call, tree.golden if row.pair.golden else tree.target
        if row.grade != UNMATCHED or call.is_module or call.backward or not IN_PLACE.search(call.path):
            continue
        calls = list(record.calls.values())
        later = any(one.is_module and not one.backward for one in calls[calls.index(call) :])
        if later and record.within(call.name) is None and is_judged(tree, row):
            return row
    return None


def _is_harmless(tree: RowTree, row: CallRow) -> bool:
    """Return whether the sides agree without a call: it returns its input, needs no gradient, or one around agrees.

    A backward without gradients of parameters is so where all parameters have their gradients on both sides.
    """
    call, golden = row.pair.call, row.pair.golden is not None
    record, other = (tree.golden, tree.target) if golden else (tree.target, tree.golden)
    if not other.complete:
        return False
    if call.backward:
        forward = (tree.of_golden if golden else tree.of_target).get(call.forward_name)
        if forward is not None and forward.grade == UNMATCHED:
            return _is_harmless(tree, forward)
        sides = [cell.side for other in tree.rows for cell in other.cells]
        lost = any(
            other.gaps or (other.grade == UNMATCHED and other.pair.call.gradients) for other in tree.rows
        )
        return forward is not None and tree.outer(row) is not None and "gradient" in sides and not lost
    floating = [value for value in call.outputs.values() if value.floating]
    if call.is_module and not call.buffers and all(value.requires_grad is False for value in floating):
        return True  # a pass under no_grad, whose results no compared call has received
    results = {key(value) for value in call.outputs.values()}
    outer = tree.outer(row)
    if outer is not None and any(cell.side == "output" for cell in outer.cells):
        return True
    if not call.is_module:
        return any(other.cells for other in tree.rows[tree.position(row) :])
    inside = [one for one in record.calls.values() if record.within(one.name) == call.name]
    return any(results <= {key(value) for value in one.outputs.values()} for one in inside)

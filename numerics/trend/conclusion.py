"""Say in plain words what the trends show, and what to do next. Each sentence is a fact of the other modules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numerics.trend.anomalies import (
    DEFAULT,
    HISTORY,
    NOT_FINITE,
    Anomalies,
    Anomaly,
    find_anomalies,
    only_in,
    statistics_of,
)
from numerics.trend.attribution import (
    DIFFERS,
    LOSS_FIRST,
    LOSS_ONLY,
    NORM_FIRST,
    NORM_ONLY,
    TOGETHER,
    Attribution,
    Carrier,
    attribute,
)
from numerics.trend.departure import Departures, describe_departures, find_departures
from numerics.trend.history import ALARM, BEFORE, LEAST
from numerics.trend.ranks import Ranks, compare_ranks
from numerics.trend.tables import Monitored

Record = Callable[[Monitored, int], str]  # the command that records a step
Watch = Callable[
    [Monitored, Sequence[str]], str
]  # the command that monitors kinds from now on; "" where none can
FIRST_CAUSES = ("actv", "param")  # to look at where the loss is anomalous first (section 2.3.1.3)
EMBEDDING = re.compile(
    r"(^|[._])((tok|token|pos|position|word)?_?(emb|embed|embedding|embeddings)|token|wte|wpe)([._]|$)"
)
QUIET_LOSS, QUIET_NORM = "the loss is not", "the gradient norm is not"
SHOWN, LISTED = 5, 3  # tensors in a list, and of those of one run only


@dataclass
class Trend:
    """All results of one run, or of a run against a reference."""

    run: Monitored
    reference: Monitored | None
    anomalies: Anomalies
    attribution: Attribution
    ranks: Ranks
    own: list[Anomalies] = field(
        default_factory=list
    )  # with a reference: of each run against its own history
    departures: Departures | None = None  # with a reference


def analyse(run: Monitored, reference: Monitored | None = None) -> Trend:
    """Find and attribute the anomalies of a run."""
    found = find_anomalies(run, reference)
    own = [find_anomalies(one) for one in (reference, run) if one] if reference else []
    departures = find_departures(run, reference) if reference else None
    return Trend(run, reference, found, attribute(run, found, reference), compare_ranks(run), own, departures)


def sentences(trend: Trend) -> list[str]:
    """Return the conclusion, the most important fact first."""
    found = [_first(trend), _order(trend), _carrier(trend), _throughout(trend), *_only(trend)]
    found += _ranks(trend.ranks)
    found += [describe_departures(trend.departures)] if trend.departures else []
    return [one for one in found if one]


def next_commands(trend: Trend, record: Record, watch: Watch = lambda run, kinds: "") -> list[str]:
    """Return what to do next."""
    missing = _not_monitored(trend)
    watched = [one for one in [watch(trend.run, missing) if missing else ""] if one]
    return [*_recordings(trend, record), *watched] or ([] if trend.reference else trend.anomalies.advice)


def _not_monitored(trend: Trend) -> list[str]:
    """Return the kinds to look at where the loss is anomalous before the gradient norm, without a table."""
    if trend.attribution.order not in (LOSS_FIRST, LOSS_ONLY):
        return []
    return [kind for kind in FIRST_CAUSES if not trend.run.of_kind(kind)]


def _recordings(trend: Trend, record: Record) -> list[str]:
    found, first = trend.attribution, trend.anomalies.first
    runs = [one for one in (trend.reference, trend.run) if one]
    steps: list[int | None] = [first.step] if first is not None else []
    curves = [step for step in (found.norm_step, found.loss_step) if step is not None]
    if first is not None and first.reason == NOT_FINITE:
        pass
    elif _difference(trend):
        steps = [found.difference.step] if found.difference else []
    elif steps or curves:
        steps = [min([*([first.step] if first else []), *curves])]
    elif trend.reference and _carrier(trend):
        steps = [*found.steps[:1]]
    return [record(run, step) for step in steps if step is not None for run in runs]


def _first(trend: Trend) -> str:
    found = trend.anomalies
    first, tests = found.first, found.tests
    if first is None and not any(map(statistics_of, trend.run.tables.values())):
        return f"Nothing is tested: no table has one of {', '.join(DEFAULT)}; fix: monitor the norm"
    if first is None and not tests and trend.reference:
        return (
            f"Nothing is tested: at most {found.most} steps are common to both runs with finite values of the same "
            f"tensor, and a history needs {BEFORE + LEAST}; fix: monitor the same tensors in more common steps"
        )
    if first is None and not tests:
        steps = max(len(table.steps) for table in trend.run.tables.values())
        return (
            f"Nothing is tested: the tables have at most {steps} steps, and a history needs {BEFORE + LEAST}; fix: "
            "monitor more steps (CONFIG_MONITOR_INTERVAL=1)"
        )
    if first is None:
        than = f"{trend.run.name} does not leave the envelope of {trend.reference.name}" if trend.reference else (
            "no tensor leaves its history"
        )  # fmt: skip
        rate = f"a clean run has an alarm with a probability of at most {ALARM:g}"
        return f"No anomaly: {than} ({tests:,} values in {len(found.tested):,} of {len(found.steps):,} steps; {rate})"
    count = len(found.found)
    total = "1 anomaly" if count == 1 else f"{count:,} anomalies"
    untested = "no value has a history, and only values that are not finite were tested"
    if found.tested:
        untested = f"before step {min(found.tested):,} only values that are not finite were tested"
    said = describe(first, bool(trend.run.ranks[1:]))
    return f"{_difference(trend)}First anomaly: {said}; {total} in all; {untested}"


def _difference(trend: Trend) -> str:
    """Return the first difference where it is before the first anomaly, which needs a history."""
    found, first = trend.attribution.difference, trend.anomalies.first
    if found is None or first is None or found.step >= first.step:
        return ""
    return (
        f"First difference: step {found.step}, {found.kind} of {found.name} is {found.ratio:.3g} times the "
        f"reference's, and off by over {100 * DIFFERS:.0f} % in {found.count} of {found.steps} common steps. "
    )


def describe(one: Anomaly, with_rank: bool = False) -> str:
    """Return one anomaly in words."""
    where = f"step {one.step}, {one.kind} of {one.name}{f' on rank {one.rank}' if with_rank else ''}"
    if one.reason == NOT_FINITE:
        return f"{where} is not finite"
    than = "its history expects" if one.reason == HISTORY else "the reference has"
    return (
        f"{where}: {one.statistic} {one.value:.4g} where {than} {one.expected:.4g} "
        f"({abs(one.units):.3g} medians, limit {one.limit:.3g})"
    )


def _order(trend: Trend) -> str:
    found = trend.attribution
    than = " against the reference" if trend.reference else ""
    match found.order:
        case order if order == NORM_FIRST:
            return (
                f"The gradient norm is anomalous{than} from step {found.norm_step}, before the loss "
                f"(step {found.loss_step}): look at gradients first"
            )
        case order if order == LOSS_FIRST:
            return (
                f"The loss is anomalous{than} from step {found.loss_step}, before the gradient norm "
                f"(step {found.norm_step}): look at activations and weights first{_missing(trend)}"
            )
        case order if order == TOGETHER:
            return (
                f"Loss and gradient norm are anomalous{than} from the same step, {found.norm_step}: its batch, or the "
                "update of the step before"
            )
        case order if order == NORM_ONLY:
            return f"The gradient norm is anomalous{than} from step {found.norm_step}; {_loss(trend)}"
        case order if order == LOSS_ONLY:
            return f"The loss is anomalous{than} from step {found.loss_step}; {_norm(trend)}{_missing(trend)}"
    if trend.anomalies.found and _loss(trend) != QUIET_LOSS and _norm(trend) == QUIET_NORM:
        return f"The gradient norm is not anomalous{than}; {_loss(trend)}"
    if trend.anomalies.found and _loss(trend) == QUIET_LOSS and _norm(trend) != QUIET_NORM:
        return f"The loss is not anomalous{than}; {_norm(trend)}"
    if trend.anomalies.found and _loss(trend) == QUIET_LOSS:
        return f"Neither the loss nor the gradient norm is anomalous{than}"
    return ""


def _missing(trend: Trend) -> str:
    kinds = _not_monitored(trend)
    return f"; {' and '.join(kinds)} {'are' if kinds[1:] else 'is'} not monitored" if kinds else ""


def _loss(trend: Trend) -> str:
    """Return why the loss is not anomalous."""
    curves = [{*one.losses} for one in (trend.reference, trend.run) if one]
    count = len(set.intersection(*curves))
    if not all(curves):
        return "no loss was given (--losses)"
    return QUIET_LOSS if count > BEFORE + LEAST else f"the loss has only {count} steps and was not tested"


def _norm(trend: Trend) -> str:
    return QUIET_NORM if trend.run.norms or trend.attribution.kind else "no gradient norm was monitored"


def _carrier(trend: Trend) -> str:
    found = trend.attribution
    if not found.carriers or not found.carriers[0].share:
        return ""
    top = found.carriers[0]
    if not trend.anomalies.found and not found.anomalous and abs(math.log(max(top.ratio, 1e-30))) < DIFFERS:
        return ""  # rounding
    layer, share = next(iter(found.layers.items()))
    if found.anomalous:
        steps = (
            f"at the first {len(found.steps)} anomalous steps"
            if len(found.steps) > 1
            else f"at step {found.steps[0]}"
        )
    elif len(found.steps) == 1:
        steps = f"at step {found.steps[0]}"
    else:
        steps = f"at the first {len(found.steps)} common steps"
    correlation = f", correlation with the total {top.correlation:.2f}" if top.correlation is not None else ""
    text = (
        f"{top.name} carries {100 * abs(top.share):.3g} % of the change of the squared gradient norm {steps}: its "
        f"norm is {top.ratio:.3g} times the expected one{correlation}"
    )
    if layer != top.name.rpartition(".")[0] and abs(share) > abs(top.share) + 0.05:
        text += f"; its layer {layer} carries {100 * abs(share):.3g} %" if top.name.startswith(layer) else (
            f"; the layer {layer} carries {100 * abs(share):.3g} %"
        )  # fmt: skip
    if EMBEDDING.search(top.name) and _may_be_rounding(trend, top):
        before = "compare the settings of the runs first (make diagnose), then " if trend.reference else ""
        text += (
            f". A possibility: {before}check the type in which the gradient of this embedding is summed. It is a sum "
            "over many rows, and bfloat16 loses small terms of it (the guide's case 3.2.1.3)"
        )
    return text


def _may_be_rounding(trend: Trend, top: Carrier) -> bool:
    """Whether nothing contradicts that the gradient of this tensor alone is summed in bfloat16."""
    first, found = trend.anomalies.first, trend.attribution
    if all(one.dtype == "float32" for one in (trend.reference, trend.run) if one):
        return False
    if first is not None and (first.name != top.name or top.share <= 0):
        return False
    return {one.name for one in found.persistent} <= {top.name}


def _only(trend: Trend) -> list[str]:
    """Return what only one of two runs has."""
    said = []
    for one in _unpaired(trend):
        if tensors := one["tensors"]:
            more = ", ..." if len(tensors) > LISTED else ""
            count = f"{len(tensors):,} tensors" if len(tensors) > 1 else "1 tensor"
            names = ", ".join(tensors[:LISTED])
            said.append(f"Only {one['run']} has {count}, so nothing is compared there: {names}{more}")
        if one["kinds"]:
            said.append(
                f"Only {one['run']} has tables of {', '.join(one['kinds'])}, so they are not compared"
            )
    return said


def _unpaired(trend: Trend) -> list[dict[str, Any]]:
    if trend.reference is None:
        return []
    pairs = ((trend.reference, trend.run), (trend.run, trend.reference))
    return [
        {"run": one.name, "kinds": kinds, "tensors": tensors}
        for one, other in pairs
        for kinds, tensors in [only_in(one, other)]
        if kinds or tensors
    ]


def _throughout(trend: Trend) -> str:
    found = trend.attribution.persistent
    if not found:
        return ""
    top, tensors = found[0], len(trend.attribution.carriers)
    count = (
        f"{len(found)} of {tensors} tensors differ" if len(found) > 1 else f"1 of {tensors} tensors differs"
    )
    side = "smaller" if top.ratio < 1 else "larger"
    return (
        f"{count} from the reference throughout: the norm of {top.name} is {side} in {top.count} of {top.steps} steps, "
        f"{top.ratio:.3g} times in the median"
    )


def _ranks(ranks: Ranks) -> list[str]:
    found = []
    bad = ranks.not_finite
    if bad and ranks.count == 1:
        found.append(f"Before reduction the gradient is not finite at step {bad.step}, in {bad.name} first")
    elif bad:
        names = ", ".join(map(str, bad.ranks))
        which = f"only rank {names} of {ranks.count}" if len(bad.ranks) < ranks.count else "every rank"
        found.append(
            f"Before reduction {which} is not finite at step {bad.step}, in {bad.name} first: "
            + (
                "check the data and the device of this rank"
                if len(bad.ranks) < ranks.count
                else "no single rank is the cause"
            )
        )
    for one in ranks.deviating:
        found.append(
            f"Rank {one.rank} has the {'largest' if one.largest else 'smallest'} gradient norm before reduction in "
            f"{one.count} of {one.steps} steps, {one.ratio:.3g} times that of the other ranks "
            f"(chance: {one.probability:.1g})"
            + ("; of two ranks it cannot be known which is wrong" if ranks.count == 2 else "")
        )
    if ranks.mismatched:
        names = ", ".join(list(ranks.mismatched)[:SHOWN])
        worst = max(ranks.mismatched.values())
        found.append(
            f"The reduced gradient is not the {ranks.operation} of the ranks in {len(ranks.mismatched)} of "
            f"{ranks.checked} tensors (mean off by {100 * worst:.3g} % in the median): {names}"
        )
    return found


def as_json(trend: Trend, commands: list[str]) -> dict[str, Any]:
    """Return what trend.json holds. Numbers that are not finite are null."""
    found = trend.attribution
    runs = [one for one in (trend.reference, trend.run) if one]
    content: dict[str, Any] = _plain(
        {
            "schema": 1,
            "runs": [
                {
                    "name": one.name,
                    "path": str(one.path),
                    "ranks": one.ranks,
                    "notes": one.notes,
                    "dtype": one.dtype or None,
                }
                for one in runs
            ],
            "reference": trend.reference.name if trend.reference else None,
            "alarm": ALARM,
            "tested_values": trend.anomalies.tests,
            "tested_steps": len(trend.anomalies.tested),
            "steps": len(trend.anomalies.steps),
            "first_tested_step": min(trend.anomalies.tested, default=None),
            "first_difference": vars(found.difference) if found.difference else None,
            "first_differing_value": _departures(trend.departures),
            "only_in_one_run": _unpaired(trend),
            "conclusion": sentences(trend),
            "next": commands,
            "order": found.order,
            "loss_step": found.loss_step,
            "gradient_norm_step": found.norm_step,
            "attribution": {
                "kind": found.kind or None,
                "steps": found.steps,
                "anomalous": found.anomalous,
                "excess": found.excess,
                "layers": found.layers,
                "persistent": [vars(one) for one in found.persistent],
                "tensors": [vars(one) for one in found.carriers],
            },
            "ranks": {
                "count": trend.ranks.count,
                "not_finite": vars(trend.ranks.not_finite) if trend.ranks.not_finite else None,
                "deviating": [vars(one) for one in trend.ranks.deviating],
                "reduction": trend.ranks.operation or None,
                "checked": trend.ranks.checked,
                "mismatched": trend.ranks.mismatched,
            },
            "anomalies": [vars(one) for one in trend.anomalies.found],
        }
    )
    return content


def _departures(found: Departures | None) -> dict[str, Any] | None:
    return vars(found) | {"first": vars(found.first) if found.first else None} if found else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value

"""Read and write attention statistics and maps of runs (attention.json). Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field

from runtime import records, run_record
from runtime.errors import UserError
from runtime.records import InvalidJsonError, Record, parse
from study import plan_file
from study.rate_tuning import judged_at_best
from study.runs import Run, read_runs

STATISTICS = {  # name -> (title, whether the value differs between the paths)
    "total_variation": ("total variation between the paths", False),
    "jensen_shannon": ("Jensen-Shannon divergence between the paths (bits)", False),
    "entropy": ("entropy (bits)", True),
    "distance": ("mean attention distance (tokens)", True),
    "previous": ("mass on the previous token", True),
    "first": ("mass on the first token", True),
}
PATHS = ("standard", "reciprocal")
SCHEMA = 1
FILE = "attention.json"

Numbers = tuple[float, ...]  # a value for each head
Masses = tuple[tuple[float, ...], ...]  # row i: attention mass from query block i to key blocks 0 .. i


class InputText(Record, frozen=True):
    """The inspected text. tokens: their number. pieces: the tokens as strings, for a short text only."""

    source: str
    tokens: int
    pieces: tuple[str, ...] = ()


class LayerAttention(Record, frozen=True):
    """Statistics of one layer. reciprocal_share: weight of the reciprocal path; None for custom attention."""

    layer: int
    reciprocal_share: float | None
    total_variation: Numbers
    jensen_shannon: Numbers
    entropy_standard: Numbers
    entropy_reciprocal: Numbers
    distance_standard: Numbers
    distance_reciprocal: Numbers
    previous_standard: Numbers
    previous_reciprocal: Numbers
    first_standard: Numbers
    first_reciprocal: Numbers


class AttentionMap(Record, frozen=True):
    """Both paths of one head."""

    layer: int
    head: int
    standard: Masses
    reciprocal: Masses


class RunAttention(Record, frozen=True):
    """Attention of one run on one text. depth: layers of the model. block: tokens for each cell of a map.

    A layer without query and key is absent from `layers`.
    """

    name: str = field(name="run")
    variant: str
    seed: int
    iteration: int
    depth: int
    block: Annotated[int, Meta(ge=1)]
    layers: tuple[LayerAttention, ...]
    pictures: tuple[AttentionMap, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = [statistic_key(name, path) for name, path in statistics_by_path()]
        heads = {len(getattr(layer, key)) for layer in self.layers for key in keys}
        if len(heads) > 1 or 0 in heads:
            raise ValueError("layers have different numbers of heads")

    def share(self, number: int) -> float | None:
        """The weight of the reciprocal path in a layer."""
        return next(layer.reciprocal_share for layer in self.layers if layer.layer == number)


def statistic_key(name: str, path: str) -> str:
    """Return the field of `LayerAttention`; it names the path if the value differs between the paths."""
    return f"{name}_{path}" if STATISTICS[name][1] else name


def statistics_by_path() -> list[tuple[str, str]]:
    """Return every (name, path) with a value; a statistic common to both paths has PATHS[0]."""
    return [
        (name, path)
        for name, (_, by_path) in STATISTICS.items()
        for path in (PATHS if by_path else PATHS[:1])
    ]


def layer_means(run: RunAttention, name: str, path: str) -> dict[int, float]:
    """Return layer -> mean over the heads."""
    found = {layer.layer: getattr(layer, statistic_key(name, path)) for layer in run.layers}
    return {number: sum(values) / len(values) for number, values in found.items()}


def early_late_means(run: RunAttention, name: str, path: str) -> tuple[float | None, float | None]:
    """Return the means over layers 0 .. L/2-1 and L/2 .. L-1; None if no such layer was measured."""
    means, middle = layer_means(run, name, path), run.depth // 2
    parts = ([m for n, m in means.items() if n < middle], [m for n, m in means.items() if n >= middle])
    early, late = (sum(part) / len(part) if part else None for part in parts)
    return early, late


def used_path(share: float | None) -> str:
    """Name the path that a layer uses."""
    if share is None:
        return "custom attention"
    return {0.0: "standard", 1.0: "reciprocal"}.get(share, f"{100 * share:.1f} % reciprocal")


# ---- files


def write(folder: Path, runs: Sequence[RunAttention], text: InputText) -> None:
    """Write attention.json of a study or of a run."""
    value = {"schema": SCHEMA, "text": text.to_json(), "runs": [run.to_json() for run in runs]}
    of = run_record.owner_at(folder) if (folder / "run.json").exists() else folder.name
    records.write(folder / FILE, value, of, indent=None)  # on one line: it is large


def read_study(study_dir: Path) -> tuple[list[RunAttention], InputText] | None:
    """Read attention.json of a study; None if it does not exist or is not valid."""
    try:
        content = records.read_plain(study_dir / FILE)
        known = content["schema"] == SCHEMA
        text = parse(InputText, content["text"], "text")
        runs = [parse(RunAttention, run, "run") for run in content["runs"]]
    except (OSError, UserError, InvalidJsonError, LookupError, TypeError):
        return None
    shapes = all(
        [len(row) for row in masses] == list(range(1, -(-text.tokens // run.block) + 1))
        for run in runs
        for drawn in run.pictures
        for masses in (drawn.standard, drawn.reciprocal)
    )
    return (runs, text) if known and shapes else None


def uninspected_runs(study_dir: Path) -> list[Run]:
    """Return each variant's counted run of the lowest seed; none where attention.json has them as they are."""
    plan = plan_file.read_valid(study_dir)  # the report names a damaged one
    judged = judged_at_best(plan, read_runs(study_dir))
    first = {
        run.variant: run for run in reversed(judged) if run.used
    }  # runs are sorted by seed: the lowest wins
    chosen = list(first.values())[::-1]
    existing = read_study(study_dir)
    wanted = {(run.name, run.record.progress.iterations) for run in chosen}
    same = existing and {(run.name, run.iteration) for run in existing[0]} == wanted
    return [] if same else chosen

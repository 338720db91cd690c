"""Declare the symbol of each field of the settings, and read such fields from .config.

    learning_rate: Annotated[float, Symbol("LEARNING_RATE", "numbers", "schedule", within="(0, 1]")]

Refusals, comparisons and docs/configuration.md derive from the declarations. Effects:

numbers: those of a run. In a study that has runs a change is refused.
rounding: may differ between machines and between runs; recorded, and allowed.
verdict: what is measured and judged, not how a run trains. In a study that has runs a change is refused.
free: place, speed of the driver and names; not a bit of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from runtime.dotconfig import Symbols, split_words

T = TypeVar("T")
Effect = Literal["numbers", "rounding", "verdict", "free"]


@dataclass(frozen=True)
class Symbol:
    """The symbol of Kconfig that sets a field."""

    name: str  # of a choice: the start of its members, such as "TARGET_"
    effect: Effect
    entry: str = ""  # of a run's record that holds the value or a digest of it
    within: str = ""  # interval of a number, which is text: Kconfig has ranges of whole numbers alone
    members: Mapping[str, str] = field(default_factory=dict, hash=False)  # of a choice: symbol -> value
    needs: str = ""  # the flag without which Kconfig hides the symbol, so that the field has its default

    def read(self, kind: Any, symbols: Symbols) -> Any:
        """Return the value as `kind`. ConfigError for a value of another form."""
        if self.members:
            return self.members[symbols.choice(self.members)]
        if kind is float:
            return symbols.number(self.name, self.within)
        return READERS[kind](symbols, self.name)


READERS = {
    int: Symbols.integer,
    bool: Symbols.flag,
    str: Symbols.text,
    Path: Symbols.folder,
    Path | None: lambda symbols, name: Path(text) if (text := symbols.text(name)) else None,
    tuple[str, ...]: lambda symbols, name: split_words(symbols.text(name)),
}


def read(kind: type[T], symbols: Symbols, **derived: Any) -> T:
    """Return a dataclass with the values of its symbols. derived: fields that are not read.

    A field that is a dataclass is read by its `from_symbols`. ConfigError names the first value of another form.
    """
    values = dict(derived)
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        symbol = symbol_of(annotation)
        if name in derived:
            continue
        if symbol is None and hasattr(annotation, "from_symbols"):
            values[name] = annotation.from_symbols(symbols)
        elif symbol and (not symbol.needs or symbols.is_on(symbol.needs)):
            values[name] = symbol.read(get_args(annotation)[0], symbols)
    return kind(**values)


def symbol_of(annotation: Any) -> Symbol | None:
    """Return the declaration in the annotation of a field, None for a field that follows from others."""
    parts = get_args(annotation) if get_origin(annotation) is Annotated else ()
    return next((part for part in parts if isinstance(part, Symbol)), None)


def symbols_of(kind: Any) -> dict[str, Symbol]:
    """Return the declaration of each field of a dataclass that has a symbol, by the name of the field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: symbol for name, hint in hints.items() if (symbol := symbol_of(hint))}


def walk(annotation: Any) -> Iterator[Symbol]:
    """Yield all symbols of a dataclass, and of the dataclasses in the annotations of its fields."""
    if isinstance(annotation, Symbol):
        yield annotation
        return
    inner = dataclasses.is_dataclass(annotation)
    for part in get_type_hints(annotation, include_extras=True).values() if inner else get_args(annotation):
        yield from walk(part)


def numbers_of(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass on which the numbers of a run depend, with their values, for its digest."""
    symbols = symbols_of(type(settings))
    return {
        name: value
        for name, value in dataclasses.asdict(settings).items()
        if name not in symbols or symbols[name].effect == "numbers"
    }

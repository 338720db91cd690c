"""Read JSON values as frozen dataclasses, and write them back. Standard library only.

The annotations of a dataclass are its schema: names are keys (or `metadata["key"]`), a field without a default is
required, Annotated carries Range or NonEmpty. Missing marks a key that is left out instead of null. Unknown keys are
refused.
A reader is built once per type, so that a thousand records are read in a second.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from runtime.files import DamagedFileError, read_json

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
KINDS: dict[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class InvalidJsonError(ValueError):
    """A JSON value does not have the type. The message names its path."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both inclusive."""

    low: float
    high: float | None = None


@dataclass(frozen=True)
class NonEmpty:
    """A string of at least one character."""


@dataclass(frozen=True)
class LeftOut:
    """Marks a field that is left out of the JSON object if it is None."""


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Amount = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Text = Annotated[str, NonEmpty()]
Missing = Annotated[T | None, LeftOut()]


class JsonObject:
    """Base of the dataclasses."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        plain: dict[str, Any] = to_plain(self)
        return plain


def parse(kind: type[T], value: Any, where: str) -> T:
    """Return `value` as `kind`. InvalidJsonError names the first part of another type. where: the value's path."""
    hint: Any = kind  # a type is hashable, which the cache needs
    reader: Reader = _reader(hint)
    result: T = reader(value, where)
    return result


def read_file(kind: type[T], path: Path) -> T:
    """Return the JSON content of a file as `kind`. DamagedFileError for any defect but a missing file."""
    try:
        return parse(kind, read_json(path), "content")
    except InvalidJsonError as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error


def to_plain(value: Any) -> Any:
    """Return plain JSON data, with objects and tuples inside converted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = [
            (key, field.left_out, getattr(value, field.name))
            for key, field in _fields(_class_of(value)).items()
        ]
        return {key: to_plain(item) for key, left_out, item in values if item is not None or not left_out}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def _mismatch(value: Any, where: str, expected: str) -> InvalidJsonError:
    return InvalidJsonError(f"{where} is {json.dumps(value)[:60]}; {expected} expected")


def _class_of(value: Any) -> Any:
    return type(value)


class _Field(NamedTuple):
    """A field of a dataclass. left_out: whether its key is left out where it is None."""

    name: str
    read: Reader
    required: bool
    left_out: bool


@functools.cache
def _fields(kind: Any) -> dict[str, _Field]:
    """Return JSON key -> field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {}
    for one in dataclasses.fields(kind):
        hint, annotations = hints[one.name], getattr(hints[one.name], "__metadata__", ())
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        left_out = any(isinstance(part, LeftOut) for part in annotations)
        if left_out:
            hint = get_args(hint)[0]
            (hint,) = (part for part in get_args(hint) if part is not type(None))
        found[one.metadata.get("key", one.name)] = _Field(one.name, _reader(hint), required, left_out)
    return found


@functools.cache
def _reader(hint: Any) -> Reader:
    """Build the reader of an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return _constrained(_reader(arguments[0]), arguments[1])
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _list(_reader(arguments[0]))
    if dataclasses.is_dataclass(hint):
        return _object(hint)  # type: ignore[arg-type]
    if hasattr(hint, "_fields"):
        return _row(hint)
    if origin is not None and issubclass(origin, Mapping):
        return _plain_object if arguments[1] is Any else _mapping(_reader(arguments[1]))
    return _scalar(hint)


def _scalar(kind: type) -> Reader:
    expected = KINDS[kind]

    def read(value: Any, where: str) -> Any:
        same = type(value) is kind or (kind is float and type(value) is int)
        if not same and kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if not same:
            raise _mismatch(value, where, expected)
        return value

    return read


def _constrained(inner: Reader, bound: Range | NonEmpty) -> Reader:
    def read(value: Any, where: str) -> Any:
        result = inner(value, where)
        if isinstance(bound, NonEmpty):
            if not result:
                raise InvalidJsonError(f"{where} is empty")
        elif result < bound.low:
            raise InvalidJsonError(f"{where} is {result}; at least {bound.low} expected")
        elif bound.high is not None and result > bound.high:
            raise InvalidJsonError(f"{where} is {result}; at most {bound.high} expected")
        return result

    return read


def _union(arguments: tuple[Any, ...]) -> Reader:
    """Build the reader of X | None; other unions are not needed."""
    (kind,) = (part for part in arguments if part is not type(None))
    inner = _reader(kind)
    return lambda value, where: None if value is None else inner(value, where)


def _literal(choices: tuple[Any, ...]) -> Reader:
    def read(value: Any, where: str) -> Any:
        number = isinstance(value, float) and value.is_integer()
        for choice in choices:
            if value == choice and (type(value) is type(choice) or number):
                return choice
        raise InvalidJsonError(f"{where} is {value!r}; one of {list(choices)} expected")

    return read


def _list(inner: Reader) -> Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _mismatch(value, where, "array")
        return tuple(inner(item, f"{where}[{number}]") for number, item in enumerate(value))

    return read


def _row(kind: Any) -> Reader:
    """Build the reader of a NamedTuple: an array of fixed length."""
    readers = [_reader(hint) for hint in typing.get_type_hints(kind, include_extras=True).values()]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _mismatch(value, where, "array")
        if len(value) != len(readers):
            raise InvalidJsonError(f"{where} has {len(value)} entries; {len(readers)} expected")
        return kind(
            *(
                inner(item, f"{where}[{number}]")
                for number, (inner, item) in enumerate(zip(readers, value, strict=True))
            )
        )

    return read


def _plain_object(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(value, where, "object")
    return value


def _mapping(inner: Reader) -> Reader:
    def read(value: Any, where: str) -> Any:
        return {key: inner(item, f"{where}.{key}") for key, item in _plain_object(value, where).items()}

    return read


def _object(kind: Callable[..., Any]) -> Reader:
    def read(value: Any, where: str) -> Any:
        known, plain = _fields(kind), _plain_object(value, where)
        for key, field in known.items():
            if field.required and key not in plain:
                raise InvalidJsonError(f"{where}.{key} is missing")
        arguments = {}
        for key, item in plain.items():
            if key not in known:
                raise InvalidJsonError(f"{where}.{key} is not part of the schema")
            arguments[known[key].name] = known[key].read(item, f"{where}.{key}")
        try:
            return kind(**arguments)
        except ValueError as error:  # of __post_init__
            raise InvalidJsonError(f"{where}: {error}") from error

    return read

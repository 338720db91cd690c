import hashlib
import subprocess
from pathlib import Path

import pytest

from gpt2.artifacts import equivalent_code
from gpt2.artifacts.equivalent_code import changed_code, equivalent_versions, module_digest, present_names
from scripts.dev.equivalent_code import extended, present_modules

ROOT = Path(equivalent_code.__file__).parents[2]
SOURCE = b'''"""A module."""
import math


def area(radius: float, *, scale: float = 1.0) -> float:
    """Return the area."""
    return math.pi * radius**2 * scale  # in square metres


def text(value: float) -> str:
    return f"{value:.3f} of {value!r}"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"""A module."""', b'"""Another text."""'),
        (b'    """Return the area."""\n', b""),
        (b"  # in square metres", b""),
        (b"import math\n\n\n", b"import math\n# layout\n\n"),
        (b"radius**2 * scale", b"(radius**2) * scale"),
    ],
)
def test_docstrings_comments_and_layout_do_not_change_a_digest(old: bytes, new: bytes) -> None:
    assert SOURCE.count(old) == 1
    assert module_digest(SOURCE.replace(old, new)) == module_digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"radius**2", b"radius**3"),
        (b"radius**2", b"radius*2"),
        (b"1.0", b"1"),
        (b"import math", b"import cmath as math"),
        (b".3f", b".4f"),
        (b"value!r", b"value"),
        (b"*, scale", b"scale"),
        (b"math.pi * radius", b"math.e * radius"),
        (b"radius**2 * scale", b"(radius**2 * scale)"),  # another order of operations
    ],
)
def test_a_change_of_the_code_changes_its_digest(old: bytes, new: bytes) -> None:
    assert SOURCE.count(old) == 1
    assert module_digest(SOURCE.replace(old, new)) != module_digest(SOURCE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"x = {**a, b: c}", b"x = {b: a, **c}"),
        (b"def f(*, a, b=1): 0", b"def f(*, a=1, b): 0"),
        (b"x = None", b"x = True"),
        (b"return_ = [a, b]", b"return_ = [b, a]"),
        (b"x = '1'", b"x = 1"),
        (b"f(a, b)", b"f(a)(b)"),
        (b"if a:\n    b\nelse:\n    c", b"if a:\n    b\n    c"),
    ],
)
def test_different_trees_have_different_digests(one: bytes, other: bytes) -> None:
    assert module_digest(one) != module_digest(other)


def test_the_present_computing_modules_are_listed_as_equivalent_to_the_reference_commit() -> None:
    listed = equivalent_versions()["present"]
    differing = sorted(name for name, digest in present_modules().items() if listed.get(name) != digest)
    assert not differing, f"changed: {differing}. fix: python -m scripts.dev.equivalent_code"


def test_the_reference_lists_the_modules_of_its_commit() -> None:
    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout

    try:
        paths = git("ls-tree", "-r", "--name-only", "8aabecd", "gpt2", "ra").decode().split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of this checkout does not reach back to the reference commit")
    expected = {
        path.removesuffix(".py").replace("/", "."): hashlib.sha256(
            git("show", f"8aabecd:{path}")
        ).hexdigest()[:16]
        for path in paths
        if path.endswith(".py") and not path.endswith("__init__.py")
    }
    assert equivalent_versions()["reference"] == expected


def test_every_reference_module_maps_to_present_names() -> None:
    present = present_modules()
    for name in equivalent_versions()["reference"]:
        assert all(new in present for new in present_names(name)), name


def test_reference_and_present_code_have_no_changes() -> None:
    for version in ("reference", "present"):
        assert changed_code(equivalent_versions()[version]) == {}


def test_a_change_is_named_by_its_present_module_for_every_version() -> None:
    reference = dict(equivalent_versions()["reference"]) | {"gpt2.again": "0" * 16, "ra.own.mine": "1" * 16}
    assert changed_code(reference) == {"gpt2.model.recompute": "0" * 16, "ra.custom.mine": "1" * 16}
    present = dict(equivalent_versions()["present"]) | {"gpt2.model.loss": "2" * 16}
    assert changed_code(present) == {"gpt2.model.loss": "2" * 16}


def test_a_replaced_digest_remains_among_the_former_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    former = {"gpt2.a": ["1"]}
    monkeypatch.setattr("scripts.dev.equivalent_code.former_digests", lambda: former)
    listed = {"gpt2.a": "2", "gpt2.b": "3", "gpt2.gone": "4"}
    after = extended(listed, {"gpt2.a": "5", "gpt2.b": "3"})
    assert after == {"gpt2.a": ["1", "2"], "gpt2.gone": ["4"]}
    assert former == {"gpt2.a": ["1"]}
    monkeypatch.setattr(equivalent_code, "former_digests", lambda: after)
    assert changed_code({"gpt2.a": "2", "gpt2.gone": "4"}) == {}
    assert changed_code({"gpt2.a": "6"}) == {"gpt2.a": "6"}

"""A move keeps every function; a changed one is named."""

from scripts.dev.moved import differences

BASE = {
    "a.py": 'import os\n\n\ndef f(x: int) -> int:\n    """Add one."""\n    import sys\n\n    return x + 1\n',
    "b.py": "LIMIT = 3\n\n\nclass C:\n    size = 1\n\n    def g(self) -> int:\n        return LIMIT\n",
}


def test_functions_may_move_and_change_their_imports_and_docstrings() -> None:
    head = {
        "new/c.py": BASE["b.py"] + "\n\ndef f(x: int) -> int:\n    from new import sys\n\n    return x + 1\n",
    }
    assert differences(BASE, head) == []


def test_a_changed_constant_method_or_count_is_named() -> None:
    assert differences(BASE, BASE | {"b.py": BASE["b.py"].replace("LIMIT\n", "LIMIT + 1\n")}) == [
        "- b.py: C.g",
        "+ b.py: C.g",
    ]
    assert differences(BASE, BASE | {"b.py": BASE["b.py"].replace("3", "4")}) == [
        "- b.py: LIMIT = 3",
        "+ b.py: LIMIT = 4",
    ]
    assert differences(BASE, BASE | {"copy.py": BASE["a.py"]}) == ["+ copy.py: f"]

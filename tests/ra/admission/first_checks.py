"""The checks of an examination up to one, for tests that need the first violation alone."""

from ra.admission.examine import CHECKS, Check


def checks_to(last: str) -> dict[str, Check]:
    """Return the checks in their order, up to and including `last`."""
    names = list(CHECKS)
    return {name: CHECKS[name] for name in names[: names.index(last) + 1]}

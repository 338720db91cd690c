"""A folder with links to the project's parts: commands run there and write nothing into the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = (
    "Kconfig",
    "gpt2",
    "aqn",
    "ra",
    "rl",
    "study",
    "configuration",
    "pages",
    "numerics",
    "scripts",
    "defconfigs",
)


def link_project(folder: Path) -> None:
    """Link every part of the project into an existing folder."""
    for part in PARTS:
        (folder / part).symlink_to(ROOT / part)

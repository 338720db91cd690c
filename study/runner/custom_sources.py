"""The sources of users' own variants, kept with the study: runs of one variant must be of one source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from gpt2.system import files
from gpt2.system.errors import UserError
from ra import names


class SourceError(UserError, RuntimeError):
    """A variant's file is not the one that its runs were begun with."""


def snapshot_sources(study_dir: Path, variants: Iterable[str], begun: Callable[[str], bool]) -> None:
    """Copy ra/custom/<name>.py of each own variant to <study_dir>/own/; SourceError where a begun one has changed.

    begun(name): whether any run of that variant has something that must stay comparable. What else the file imports
    is not looked at.
    """
    for name in filter(names.is_custom, variants):
        source = names.CUSTOM_FOLDER / f"{name.lower()}.py"
        kept = study_dir / "own" / source.name
        text = source.read_text(encoding="utf-8")
        if kept.exists() and kept.read_text(encoding="utf-8") == text:
            continue
        if kept.exists() and begun(name):
            raise SourceError(
                f"ra/custom/{source.name} is not what runs of {name} were begun with ({kept}); right: another "
                "CONFIG_STUDY_NAME, or the file as it was"
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(kept, text)

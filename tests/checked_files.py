"""Write files of a study as the program does, with their checksums."""

from pathlib import Path
from typing import Any

from runtime import records, run_record


def sums(run_dir: Path) -> str:
    return (run_dir / records.SUMS).read_text()


def write_checked(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file of a study or a run; of a finished run with SHA256SUMS."""
    value = {key: item for key, item in value.items() if key not in ("of", "sha256")}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name != "run.json":
        in_run = path.parent.parent.name == "runs"
        records.write(path, value, records.owner(path.parent) if in_run else "")
        if in_run and (path.parent / records.SUMS).exists() and path.name not in sums(path.parent):
            run_record.write(path.parent, run_record.load(path.parent))
        return
    try:
        run_record.write(path.parent, run_record.from_json(records.to_plain(value)))
    except records.InvalidJsonError:  # what a test wants to be refused
        records.write(path, value, records.owner(path.parent))

"""Write files of a study as the program does, with their checksums."""

from pathlib import Path
from typing import Any

from runtime import records, run_record


def write_checked(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file of a study or a run; of a finished run with SHA256SUMS."""
    value = {key: item for key, item in value.items() if key not in ("of", "sha256")}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name != "run.json":
        records.write(path, value, records.owner(path.parent) if path.parent.parent.name == "runs" else "")
        return
    try:
        run_record.write(path.parent, run_record.from_json(records.to_plain(value)))
    except records.InvalidJsonError:  # what a test wants to be refused
        records.write(path, value, records.owner(path.parent))

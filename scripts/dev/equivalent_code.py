"""List the current computing modules as equivalent to the reference commit, after the reference runs pass.

Run it after a change of gpt2, aqn or ra that changes no number: python -m scripts.dev.equivalent_code
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpt2.artifacts.equivalent_code import (
    TABLE,
    equivalent_versions,
    former_digests,
    is_project_computing,
    module_digest,
)
from gpt2.system.errors import UserError, run_command
from gpt2.system.files import write_json

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = "tests/gpt2/train/test_reference_runs.py"


def present_modules(root: Path = ROOT) -> dict[str, str]:
    """Return module -> digest of the computing modules in the working tree."""
    found = {}
    for top in ("gpt2", "aqn", "ra"):
        for path in sorted((root / top).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if is_project_computing(name):
                found[name] = module_digest(path.read_bytes())
    return found


def extended(listed: Mapping[str, str], present: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the former digests with the listed ones that the present modules replace."""
    former = {name: list(digests) for name, digests in former_digests().items()}
    for name, digest in listed.items():
        if present.get(name) != digest and digest not in former.setdefault(name, []):
            former[name].append(digest)
    return {name: digests for name, digests in sorted(former.items()) if digests}


def main() -> None:
    """Run the evidence, then write the table."""
    if subprocess.run([sys.executable, "-m", "pytest", "-q", EVIDENCE], cwd=ROOT).returncode:
        raise UserError(
            f"{EVIDENCE} fails: the code computes other numbers than the reference; the table is unchanged. "
            "fix: make the test pass"
        )
    versions, present = equivalent_versions(), present_modules()
    write_json(TABLE, {**versions, "present": present, "former": extended(versions["present"], present)})
    print(f"wrote {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    run_command(main)

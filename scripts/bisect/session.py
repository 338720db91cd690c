"""One bisection: its run, its journal of replays, and what it has found."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.artifacts.provenance import source_digests
from gpt2.artifacts.run_record import RunRecord
from numerics.search.smallest_set import Journal
from scripts.bisect.play import Played, Player
from scripts.bisect.symptoms import ObservedSymptom
from scripts.record.arguments import study_folder

COMPUTING = ("gpt2.", "ra.", "aqn.")  # modules whose change makes the journal's answers void


@dataclass(frozen=True)
class Result:
    """The answer of one search. found: the smallest set; empty: none explains the symptom. rows: what was tried."""

    name: str
    text: str
    found: tuple[str, ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    fix: str = ""
    replays: int = 0


@dataclass
class BisectSession:
    """player: of the run that shows the symptom, from the state before it."""

    run_dir: Path
    record: RunRecord
    symptom: ObservedSymptom
    player: Player
    journal: Journal

    def replay(self, words: str = "", phase: str = "") -> Played:
        """Replay up to the step of the symptom, or take the journal's answer."""
        last = self.symptom.step
        question = json.dumps(["replay", self.player.start, last, words, phase])
        answer = self.journal.ask(
            question, lambda: self.tell(question, self.player.play(last, words, phase)).to_json()
        )
        return Played.from_json(answer)

    def shows(self, words: str = "", phase: str = "") -> bool:
        return self.symptom.present(self.replay(words, phase))

    def tell(self, question: str, played: Played) -> Played:
        """Print one line for a replay that was computed."""
        _, _, _, words, phase = json.loads(question)
        state = "symptom" if self.symptom.present(played) else "no symptom"
        print(f"  replay {self.journal.asked + 1}: {' '.join(filter(None, [phase, shortened(words)])) or 'as it was'}: "
              f"{state}", flush=True)  # fmt: skip
        return played


def shortened(words: str, most: int = 90) -> str:
    """Return a list of words that fits on a line."""
    return words if len(words) <= most else f"{words[:most].rpartition(' ')[0]} ... ({len(words.split())})"


def identity(
    record: RunRecord, symptom: ObservedSymptom, start: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the answers of a journal depend on."""
    return {
        "run": record.run,
        "config": record.config_sha256,
        "commit": record.commit,
        "symptom": [symptom.kind, symptom.step],
        "start": start,
        **_environment(),
        **others,
    }


@functools.cache
def _environment() -> dict[str, Any]:
    """Return a digest of the modules that compute, and the threads; once, because replays load further modules."""
    import torch

    code = json.dumps(source_digests(COMPUTING))
    return {"code": hashlib.sha256(code.encode()).hexdigest(), "threads": torch.get_num_threads()}


def default_folder(run_dir: Path, name: str) -> Path:
    """Return results/STUDY/<name>/RUN, or <name>/RUN for a run outside a study."""
    return study_folder(run_dir) / name / re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.resolve().name)

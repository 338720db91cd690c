"""HellaSwag items for tests: a dozen of the repository, and the published ones if present."""

from pathlib import Path

from gpt2 import hellaswag
from gpt2.hellaswag import Item
from tests.published import published

FIXTURE = Path(__file__).parent / "fixtures/hellaswag_small.jsonl"
REAL = "hellaswag/hellaswag_val.jsonl"


def real_items(limit: int) -> list[Item]:
    return hellaswag.load_items(published(REAL), limit)

"""HellaSwag's items that tests score and read: a dozen of the tests' own, and the published ones where they are."""

from pathlib import Path

from gpt2.eval import hellaswag
from gpt2.eval.hellaswag import Item
from tests.published import published

FIXTURE = Path(__file__).parent / "fixtures/hellaswag_small.jsonl"
REAL = "hellaswag/hellaswag_val.jsonl"


def real_items(limit: int) -> list[Item]:
    return hellaswag.load_items(published(REAL), limit)

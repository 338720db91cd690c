import contextlib
import hashlib
import http.server
import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt2 import hellaswag, tokenizer
from gpt2.config import EvaluationConfig
from gpt2.hellaswag import Absent, HellaSwagError, Item
from gpt2.model import GPT2, initialise

FIXTURE = Path(__file__).parents[1] / "fixtures/hellaswag_small.jsonl"
REAL = Path(__file__).parents[3] / "shared/data/hellaswag/hellaswag_val.jsonl"
BLOCK = 64


@pytest.fixture(scope="module")
def model() -> GPT2:
    made = GPT2(layers=1, heads=2, width=32, block_size=BLOCK, vocabulary=50257, padded_vocabulary=50304)
    initialise(made, 0)
    with torch.no_grad():
        made.token.weight.mul_(20)  # far from uniform, so that endings differ
    return made.double()


def plain_text(text: str) -> str:
    """The harness's clean-up, in our own words: titles end a sentence, other brackets go, double spaces shrink once."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def one_by_one(model: GPT2, raw: dict[str, object]) -> list[float]:
    """Log-likelihood of each ending, unbatched, from full logits."""
    query = plain_text(f"{raw['activity_label']}: {raw['ctx_a']} {str(raw['ctx_b']).capitalize()}")
    encode = tokenizer.load().encode_ordinary
    values = []
    for ending in raw["endings"]:  # type: ignore[attr-defined]
        continuation = " " + plain_text(ending)
        context = query.rstrip()
        continuation = query[len(context) :] + continuation
        whole = encode(context + continuation)
        scored = len(whole) - len(encode(context))
        whole = whole[-(BLOCK + 1) :]
        with torch.no_grad():
            log_p = model(torch.tensor([whole[:-1]]))[0].log_softmax(-1)
        targets = torch.tensor(whole[1:])
        values.append(float(log_p.gather(1, targets[:, None])[-scored:].sum()))
    return values


def score(model: object, items: list[Item], batch_tokens: int = 512) -> hellaswag.HellaSwag:
    return hellaswag.score(
        model,  # type: ignore[arg-type]
        items,
        tokenizer.load(),
        batch_tokens=batch_tokens,
        block_size=BLOCK,
        device="cpu",
        autocast=contextlib.nullcontext,
    )


def compare(model: GPT2, path: Path, limit: int) -> hellaswag.HellaSwag:
    items = hellaswag.load_items(path, 0)
    raw = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    step = max(1, len(raw) // limit)
    seen = score(model, items[::step][:limit])
    for values, choice, one in zip(seen.log_likelihoods, seen.choices, raw[::step][:limit], strict=True):
        expected = one_by_one(model, one)
        assert values == pytest.approx(expected, abs=1e-9, rel=1e-9)
        assert choice == max(range(4), key=expected.__getitem__)
    return seen


def test_batched_scores_equal_unbatched_ones_on_our_own_items(model: GPT2) -> None:
    assert compare(model, FIXTURE, 4).items == 4


def test_batched_scores_equal_unbatched_ones_on_real_items_and_spread_over_all_endings(model: GPT2) -> None:
    if not REAL.exists():
        pytest.skip("the real HellaSwag items are not beside the checkout")
    seen = compare(model, REAL, 200)
    assert set(seen.choices) == set(seen.choices_norm) == {0, 1, 2, 3}
    assert (sum(seen.correct) / len(seen.correct), sum(seen.correct_norm) / len(seen.correct_norm)) == (
        pytest.approx(seen.acc), pytest.approx(seen.acc_norm)
    )  # fmt: skip
    assert max(seen.choices.count(ending) for ending in range(4)) < 120


def test_the_size_of_a_batch_changes_nothing(model: GPT2) -> None:
    items = hellaswag.load_items(FIXTURE, 0)
    one, other = score(model, items, batch_tokens=1), score(model, items, batch_tokens=10**6)
    for a, b in zip(one.log_likelihoods, other.log_likelihoods, strict=True):
        assert a == pytest.approx(b, abs=1e-9)
    labels = [item.label for item in items]
    assert one.correct == [choice == label for choice, label in zip(one.choices, labels, strict=True)]
    assert one.correct_norm == [
        choice == label for choice, label in zip(one.choices_norm, labels, strict=True)
    ]
    assert one.acc_norm == pytest.approx(sum(one.correct_norm) / len(items))


class Knowing(torch.nn.Module):
    """Knows the right endings: they cost nothing (sign +1) or everything (sign -1)."""

    def __init__(self, items: list[Item], sign: int) -> None:
        super().__init__()
        encode = tokenizer.load().encode_ordinary
        self.right = {tuple(encode(" " + item.endings[item.label])) for item in items}
        self.sign = sign

    def token_losses(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(targets_BT.shape)
        for row, targets in enumerate(targets_BT):
            scored = targets >= 0
            right = tuple(targets[scored].tolist()) in self.right
            losses[row, scored] = 5.0 - 4.0 * self.sign * (1 if right else -1)
        return losses


def test_an_oracle_gets_everything_and_an_adversary_nothing() -> None:
    items = hellaswag.load_items(FIXTURE, 0)
    best, worst = score(Knowing(items, 1), items), score(Knowing(items, -1), items)
    assert (best.acc, best.acc_norm) == (1.0, 1.0)
    assert (worst.acc, worst.acc_norm) == (0.0, 0.0)


def test_the_standard_error_is_that_of_a_sample_mean(model: GPT2) -> None:
    seen = score(model, hellaswag.load_items(FIXTURE, 0))
    assert seen.acc_stderr == pytest.approx(math.sqrt(seen.acc * (1 - seen.acc) / 3))


def test_a_limit_takes_the_same_items_each_time(tmp_path: Path) -> None:
    lines = FIXTURE.read_text(encoding="utf-8").splitlines()
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join(lines * 10) + "\n", encoding="utf-8")
    assert hellaswag.load_items(many, 7) == hellaswag.load_items(many, 7)
    assert len(hellaswag.load_items(many, 7)) == 7
    assert len(hellaswag.load_items(many, 0)) == 40


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"endings": []}', "[]"])
def test_a_malformed_item_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(
        FIXTURE.read_text(encoding="utf-8").splitlines()[0] + "\n" + line + "\n", encoding="utf-8"
    )
    with pytest.raises(HellaSwagError, match=r"items\.jsonl:2"):
        hellaswag.load_items(path, 0)


# -- getting the file -------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = FIXTURE.read_bytes()
            if self.path == "/hangs":
                release.wait(30)
                return
            self.send_response(200 if self.path != "/missing" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:-5] if self.path == "/short" else content)

        def log_message(self, *arguments: object) -> None:
            pass

    release = threading.Event()
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    release.set()
    served.shutdown()
    served.server_close()


SETTINGS = EvaluationConfig(64, 0, True, None, 0)
SHA256 = hashlib.sha256(FIXTURE.read_bytes()).hexdigest()


def obtain(tmp_path: Path, url: str, sha256: str = SHA256) -> Path | Absent:
    return hellaswag.obtain(
        SETTINGS, tmp_path, lambda text: None, url=url, timeout_seconds=1.0, sha256=sha256
    )


def test_a_download_is_checked_kept_and_not_repeated(tmp_path: Path, server: str) -> None:
    path = obtain(tmp_path, server + "/good")
    assert isinstance(path, Path)
    assert path.read_bytes() == FIXTURE.read_bytes()
    assert obtain(tmp_path, "http://127.0.0.1:9/nobody") == path


@pytest.mark.parametrize("page", ["/short", "/missing", "/hangs"])
def test_a_download_that_fails_is_absence_with_a_reason(tmp_path: Path, server: str, page: str) -> None:
    found = obtain(tmp_path, server + page)
    assert isinstance(found, Absent)
    assert "CONFIG_HELLASWAG_FILE" in found.reason
    assert not list(tmp_path.iterdir())


def test_another_content_is_absence(tmp_path: Path, server: str) -> None:
    found = obtain(tmp_path, server + "/good", sha256="0" * 64)
    assert isinstance(found, Absent)
    assert "SHA-256" in found.reason


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    named = EvaluationConfig(64, 0, True, tmp_path / "no.jsonl", 0)
    with pytest.raises(HellaSwagError, match="is not a file"):
        hellaswag.obtain(named, tmp_path, lambda text: None)

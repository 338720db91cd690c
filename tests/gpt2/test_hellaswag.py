"""HellaSwag against a second implementation of its clean-up and its scores, item by item, and its download."""

import contextlib
import hashlib
import http.server
import json
import math
import random
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
import torch
from torch import Tensor, nn

from gpt2 import hellaswag, tokenizer
from gpt2.config import EvaluationConfig
from gpt2.hellaswag import Absent, HellaSwag, HellaSwagError, Item
from gpt2.model import GPT2, initialise
from gpt2.score import hellaswag_entry
from tests.published import published

FIXTURE = Path(__file__).parents[1] / "fixtures/hellaswag_small.jsonl"
REAL = "hellaswag/hellaswag_val.jsonl"
REAL_ITEMS = 400
FOLDED = 509  # tokens that a small model knows


class Folded:
    """GPT-2's tokens, each as its remainder: as many and in the same places, for a model with few logits."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding

    def encode_ordinary(self, text: str) -> list[int]:
        return [token % FOLDED for token in self.encoding.encode_ordinary(text)]


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return tokenizer.load()


@pytest.fixture(scope="module")
def model() -> GPT2:
    return telling_model(50257)


def telling_model(vocabulary: int) -> GPT2:
    """One narrow layer with weights large enough that the endings differ clearly."""
    model = GPT2(
        layers=1,
        heads=2,
        width=32,
        block_size=256,
        vocabulary=vocabulary,
        padded_vocabulary=-(-vocabulary // 64) * 64,
    )
    initialise(model, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model.double()


def real_items(limit: int) -> list[Item]:
    return hellaswag.load_items(published(REAL), limit)


def score(model: nn.Module, items: list[Item], encoding: tiktoken.Encoding | Folded, **changes) -> HellaSwag:
    settings = {"batch_tokens": 2048, "block_size": 256, "device": "cpu", "autocast": contextlib.nullcontext}
    return hellaswag.score(model, items, encoding, **(settings | changes))


# --- the scores against a plain reference


def reference_texts(line: str) -> tuple[str, list[str], int]:
    """Query, endings and label, worked out from the raw line by other means than the module's."""
    raw = json.loads(line)

    def clean(text: str) -> str:
        text = ". ".join(text.strip().split(" [title]"))
        kept, inside = [], False
        for place, sign in enumerate(text):
            if not inside and sign == "[" and "]" in text[place:]:
                inside = True
            if not inside:
                kept.append(sign)
            if inside and sign == "]":
                inside = False
        return " ".join("".join(kept).split("  "))

    second = raw["ctx_b"][:1].upper() + raw["ctx_b"][1:].lower()
    query = clean(f"{raw['activity_label']}: {raw['ctx_a']} {second}")
    return query, [clean(ending) for ending in raw["endings"]], int(raw["label"])


def reference_log_likelihood(
    model: GPT2, encoding: tiktoken.Encoding | Folded, query: str, ending: str, block_size: int
) -> float:
    """One ending, no batch, all logits: the sum of log p over the tokens after those of the bare query."""
    whole = encoding.encode_ordinary(f"{query} {ending}")
    start = len(encoding.encode_ordinary(query.rstrip(" ")))
    cut = max(0, len(whole) - block_size - 1)
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([whole[cut:-1]]))[0], dim=-1)
    return sum(
        log_p[place - cut - 1, whole[place]].item() for place in range(max(start, cut + 1), len(whole))
    )


def check_against_the_reference(model, encoding, lines: list[str], block_size: int, found: HellaSwag) -> None:
    assert found.items == len(lines)
    hits = hits_norm = 0
    for line, values, choice, choice_norm in zip(
        lines, found.log_likelihoods, found.choices, found.choices_norm, strict=True
    ):
        query, endings, label = reference_texts(line)
        expected = [reference_log_likelihood(model, encoding, query, e, block_size) for e in endings]
        assert values == pytest.approx(expected, abs=1e-9)
        normed = [value / len(ending) for value, ending in zip(expected, endings, strict=True)]
        assert choice == expected.index(max(expected))
        assert choice_norm == normed.index(max(normed))
        hits += choice == label
        hits_norm += choice_norm == label
    labels = [reference_texts(line)[2] for line in lines]
    assert found.correct == [choice == label for choice, label in zip(found.choices, labels, strict=True)]
    assert found.correct_norm == [
        choice == label for choice, label in zip(found.choices_norm, labels, strict=True)
    ]
    assert found.acc == hits / len(lines)
    assert found.acc_norm == hits_norm / len(lines)


@pytest.mark.parametrize("block_size", [256, 9])
def test_fixture_scores_equal_an_unbatched_reference(model: GPT2, encoding, block_size: int) -> None:
    found = score(model, hellaswag.load_items(FIXTURE, 0), encoding, block_size=block_size)
    lines = FIXTURE.read_text(encoding="utf-8").splitlines()
    check_against_the_reference(model, encoding, lines, block_size, found)


def test_hundreds_of_real_scores_equal_an_unbatched_reference(encoding: tiktoken.Encoding) -> None:
    items = real_items(REAL_ITEMS)
    model, folded = telling_model(FOLDED), Folded(encoding)
    found = score(model, items, folded)
    lines = published(REAL).read_text(encoding="utf-8").split("\n")[:-1]
    chosen = [lines[i * len(lines) // REAL_ITEMS] for i in range(REAL_ITEMS)]
    check_against_the_reference(model, folded, chosen, 256, found)
    for choices in (found.choices, found.choices_norm):
        shares = [choices.count(ending) / REAL_ITEMS for ending in range(4)]
        assert all(0.1 <= share <= 0.5 for share in shares), f"choices are not spread: {shares}"
    assert found.choices != found.choices_norm
    for p, stderr in ((found.acc, found.acc_stderr), (found.acc_norm, found.acc_norm_stderr)):
        assert stderr == pytest.approx(math.sqrt(p * (1 - p) / (REAL_ITEMS - 1)), rel=1e-12)


def test_choices_on_the_fixture_are_no_constant(model: GPT2, encoding) -> None:
    assert len(set(score(model, hellaswag.load_items(FIXTURE, 0), encoding).choices)) > 1


@pytest.mark.parametrize("batch_tokens", [1, 200, 10**6])
def test_the_batch_changes_nothing(model: GPT2, encoding, batch_tokens: int) -> None:
    items = hellaswag.load_items(FIXTURE, 0)
    expected = score(model, items, encoding)
    found = score(model, items, encoding, batch_tokens=batch_tokens)
    assert found.choices == expected.choices
    assert [v for row in found.log_likelihoods for v in row] == pytest.approx(
        [v for row in expected.log_likelihoods for v in row], abs=1e-9
    )


def test_length_is_counted_in_characters() -> None:
    """By bytes the second of two equally likely endings would be the longer one, and win."""
    item = Item("Q:", ("abcd", "éééé", "a", "b"), 0)
    found = hellaswag._summary([item], [[-4.0, -4.0, -3.0, -3.0]])
    assert found.choices_norm == [0]
    assert found.acc_norm == 1.0
    assert found.acc_norm_stderr is None


# --- which items they were


def rewritten(path: Path, line_end: str = "\n", **changes: object) -> Path:
    """The fixture in other words of JSON: other line ends, keys backwards, spaces, escapes; its first item changed."""
    rows = [json.loads(line) for line in FIXTURE.read_text(encoding="utf-8").splitlines()]
    rows[0] |= changes
    lines = [json.dumps(dict(reversed(row.items())), indent=None, separators=(" , ", " :  ")) for row in rows]
    path.write_bytes("".join(line + line_end for line in lines).encode())
    return path


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\n\n"])
def test_the_digest_is_of_the_items_and_not_of_how_their_file_is_written(
    tmp_path: Path, line_end: str
) -> None:
    again = rewritten(tmp_path / "items.jsonl", line_end)
    for limit in (0, 5):
        ours, theirs = hellaswag.load_items(FIXTURE, limit), hellaswag.load_items(again, limit)
        assert hellaswag.digest(ours) == hellaswag.digest(theirs)


def test_whatever_changes_a_question_changes_the_digest(tmp_path: Path) -> None:
    items = hellaswag.load_items(FIXTURE, 0)
    first = json.loads(FIXTURE.read_text(encoding="utf-8").splitlines()[0])
    endings = first["endings"]
    changes = [{"label": (int(first["label"]) + 1) % 4}, {"ctx_a": first["ctx_a"] + " Then"}, {"activity_label": "No"},
               {"endings": endings[::-1]}, {"endings": [*endings[:3], endings[3] + "!"]}]  # fmt: skip
    edited = [
        hellaswag.load_items(rewritten(tmp_path / f"{number}.jsonl", **change), 0)
        for number, change in enumerate(changes)
    ]
    others = [*edited, items[::-1], items[:-1], [*items, items[0]], hellaswag.load_items(FIXTURE, 5)]
    assert len({hellaswag.digest(seen) for seen in [items, *others]}) == 1 + len(others)


def test_a_score_says_which_items_it_was_taken_on(model: GPT2, encoding) -> None:
    items = hellaswag.load_items(FIXTURE, 3)
    found = hellaswag_entry(score(model, items, encoding))
    assert (found["items"], found["items_sha256"]) == (3, hellaswag.digest(items))


# --- an oracle, an adversary, a model that is broken


class Judge(nn.Module):
    """Finds the rows that end with an ending it wants, from tokens alone, and gives them a lower loss."""

    def __init__(self, wanted: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.wanted = wanted
        self.shapes: list[tuple[int, int]] = []

    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        self.shapes.append((ids_BT.shape[0], ids_BT.shape[1]))
        scored = targets_BT >= 0
        found = [
            tuple(row[keep].tolist()) in self.wanted for row, keep in zip(targets_BT, scored, strict=True)
        ]
        return torch.where(torch.tensor(found)[:, None], 0.001, 9.0) * scored


def tokens_of(encoding: tiktoken.Encoding, item: Item, labels: list[int]) -> set[tuple[int, ...]]:
    encoded = (hellaswag.encode_pair(encoding, item.query, item.endings[label]) for label in labels)
    return {tuple(tokens[-scored:]) for tokens, scored in encoded}


def test_an_oracle_gets_everything_right_and_an_adversary_nothing(encoding) -> None:
    items = hellaswag.load_items(FIXTURE, 0)
    right = set().union(*(tokens_of(encoding, item, [item.label]) for item in items))
    wrong = set().union(*(tokens_of(encoding, item, [(item.label + 1) % 4]) for item in items))
    oracle = score(Judge(right), items, encoding)
    assert (oracle.acc, oracle.acc_norm, oracle.acc_stderr, oracle.acc_norm_stderr) == (1.0, 1.0, 0.0, 0.0)
    assert oracle.choices == [item.label for item in items]
    adversary = score(Judge(wrong), items, encoding)
    assert (adversary.acc, adversary.acc_norm) == (0.0, 0.0)
    assert adversary.choices == [(item.label + 1) % 4 for item in items]


def test_no_batch_exceeds_its_tokens_unless_it_is_one_row(encoding) -> None:
    judge = Judge(set())
    score(judge, hellaswag.load_items(FIXTURE, 0), encoding, batch_tokens=60)
    assert sum(rows for rows, _ in judge.shapes) == 4 * 12
    assert all(rows * length <= 60 or rows == 1 for rows, length in judge.shapes)
    assert [length for _, length in judge.shapes] == sorted((s[1] for s in judge.shapes), reverse=True)


def test_batches_hold_every_row_once() -> None:
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(0, 30))]
        limit = draw.randint(1, 100)
        found = list(hellaswag.batches(lengths, limit))
        assert sorted(i for b in found for i in b) == list(range(len(lengths)))
        assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= limit for b in found)


def test_a_model_that_gives_no_numbers_is_an_error_not_a_score(encoding) -> None:
    class Broken(nn.Module):
        def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
            return torch.full(ids_BT.shape, math.nan)

    with pytest.raises(HellaSwagError, match="not numbers"):
        score(Broken(), hellaswag.load_items(FIXTURE, 2), encoding)


def test_no_items_is_an_error_not_a_score(encoding) -> None:
    with pytest.raises(HellaSwagError, match="no HellaSwag items"):
        score(Judge(set()), [], encoding)


def test_stop_ends_the_scoring_and_the_mode_is_restored(model: GPT2, encoding) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        score(model, hellaswag.load_items(FIXTURE, 2), encoding, stop=stop)
    assert model.training


# --- the items


def test_wikihow_marks_are_taken_out() -> None:
    found = hellaswag.prepare(" Boil it [title] Wait. [step] Go on [a [b] c] ")
    assert found == "Boil it. Wait. Go on c]"


def test_spaces_at_the_end_of_a_query_go_to_the_ending(encoding) -> None:
    tokens, scored = hellaswag.encode_pair(encoding, "One two. ", "Three")
    assert encoding.decode(tokens) == "One two.  Three"
    assert encoding.decode(tokens[-scored:]) == "  Three"


def test_a_limit_picks_items_spread_over_the_file() -> None:
    everything = hellaswag.load_items(FIXTURE, 0)
    assert len(everything) == 12
    assert hellaswag.load_items(FIXTURE, 5) == [everything[i] for i in (0, 2, 4, 7, 9)]
    assert hellaswag.load_items(FIXTURE, 12) == hellaswag.load_items(FIXTURE, 99) == everything


def test_a_limit_on_the_real_file_keeps_its_mix() -> None:
    everything, some = real_items(0), real_items(200)
    assert len(everything) == 10042
    assert len(some) == 200
    where = {id_: n for n, id_ in enumerate((item.query, item.endings) for item in everything)}
    captions = sum(where[item.query, item.endings] < 3243 for item in some)
    assert captions == pytest.approx(200 * 3243 / 10042, abs=1)


GOOD = json.loads(FIXTURE.read_text(encoding="utf-8").splitlines()[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps({k: v for k, v in GOOD.items() if k != "ctx_b"}), '"ctx_b" is missing'),
        (json.dumps({k: v for k, v in GOOD.items() if k != "label"}), '"label" is missing'),
        (json.dumps(GOOD | {"label": ""}), '"label" is ""; right: 0 .. 3'),
        (json.dumps(GOOD | {"label": 4}), '"label" is 4'),
        (json.dumps(GOOD | {"label": True}), '"label" is true'),
        (json.dumps(GOOD | {"label": 1.0}), '"label" is 1.0'),
        (json.dumps(GOOD | {"endings": ["a", "b"]}), "a list of 4 texts"),
        (json.dumps(GOOD | {"endings": "abcd"}), "a list of 4 texts"),
        (json.dumps(GOOD | {"endings": ["a", "b", "[x]", "d"]}), '"endings"[2] has no text'),
        (json.dumps(GOOD | {"ctx_a": None}), '"ctx_a" is null; right: a text'),
        ("[1, 2]", "list instead of a JSON object"),
        ('{"ind": 3, "activity', "not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(HellaSwagError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(message)) as caught:
        hellaswag.load_items(path, 1)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_an_empty_file_and_no_file_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'{"ctx_a": "\xff\xfe"}\n')
    with pytest.raises(HellaSwagError, match=r"items\.jsonl:1: not JSON in UTF-8"):
        hellaswag.load_items(path, 0)
    path.write_bytes(b"\n")
    with pytest.raises(HellaSwagError, match="has no items"):
        hellaswag.load_items(path, 0)
    with pytest.raises(HellaSwagError, match="cannot be read"):
        hellaswag.load_items(tmp_path / "none.jsonl", 0)


def test_digits_of_a_label_are_a_label(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(GOOD | {"label": "3"}), encoding="utf-8")
    assert hellaswag.load_items(path, 0)[0].label == 3


# --- getting the file

CONTENT = FIXTURE.read_bytes()
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        released: threading.Event = self.server.released
        self.server.requests += 1
        if self.path == "/silent":
            released.wait(30)
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        body = CONTENT if self.path != "/other" else b"not the items"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/trickle":
            for place in range(300):
                self.wfile.write(body[place : place + 1])
                if released.wait(0.1):
                    return
        self.wfile.write(body[:500] if self.path == "/truncated" else body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.released = threading.Event()
        self.requests = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gives up is what some tests are about."""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def evaluation(file: Path | None = None) -> EvaluationConfig:
    return EvaluationConfig(
        tokens=1024, interval_tokens=0, hellaswag=True, hellaswag_file=file, hellaswag_limit=0
    )


def obtain(directory: Path, url: str, timeout_seconds: float = 10.0) -> Path | Absent:
    return hellaswag.obtain(
        evaluation(), directory, lambda text: None, url=url, timeout_seconds=timeout_seconds, sha256=DIGEST
    )


def test_a_download_is_kept_and_used_again(server: Server, tmp_path: Path) -> None:
    found = obtain(tmp_path / "data", server.url("good"))
    assert found == tmp_path / "data" / "hellaswag_val.jsonl"
    assert found.read_bytes() == CONTENT
    assert obtain(tmp_path / "data", server.url("good")) == found
    assert server.requests == 1
    assert [path.name for path in found.parent.iterdir()] == ["hellaswag_val.jsonl"]


def test_a_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "hellaswag_val.jsonl"
    path.write_bytes(CONTENT[:-9])
    assert obtain(tmp_path, server.url("good")) == path
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "timeout_seconds", "reason"),
    [
        ("other", 10, "has SHA-256"),
        ("truncated", 10, f"after 500 of {len(CONTENT)} bytes"),
        ("missing", 10, "404"),
        ("silent", 1, "timed out|within 1 s"),
        ("trickle", 1, "within 1 s|time was up"),
    ],
)
def test_a_download_that_fails_is_absent_with_its_reason(
    server: Server, tmp_path: Path, path: str, timeout_seconds: float, reason: str
) -> None:
    found = obtain(tmp_path, server.url(path), timeout_seconds)
    assert isinstance(found, Absent)
    assert re.search(reason, found.reason)
    assert "CONFIG_HELLASWAG_FILE" in found.reason
    assert "\n" not in found.reason
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_and_a_bad_address_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        found = obtain(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert isinstance(found, Absent)
    assert "CONFIG_HELLASWAG_FILE" in found.reason
    assert isinstance(obtain(tmp_path, "nonsense"), Absent)


def test_a_folder_that_cannot_be_written_is_absent(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    assert isinstance(obtain(tmp_path / "data", server.url("good")), Absent)


def test_a_named_file_is_used_as_it_is_and_must_exist(tmp_path: Path) -> None:
    def unused(text: str) -> None:
        raise AssertionError(text)

    assert hellaswag.obtain(evaluation(FIXTURE), tmp_path, unused) == FIXTURE
    with pytest.raises(HellaSwagError, match=r"CONFIG_HELLASWAG_FILE=.*none\.jsonl is not a file"):
        hellaswag.obtain(evaluation(tmp_path / "none.jsonl"), tmp_path, unused)

"""HellaSwag items: reading a file, the digest of the items, the download."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2 import hellaswag
from gpt2.hellaswag import HellaSwagError
from runtime.errors import UserError
from runtime.settings import EvaluationConfig
from tests.hellaswag_items import FIXTURE


def test_a_limit_selects_items_across_the_file() -> None:
    everything = hellaswag.load_items(FIXTURE, 0)
    assert len(everything) == 12
    assert hellaswag.load_items(FIXTURE, 5) == [everything[i] for i in (0, 2, 4, 7, 9)]
    assert hellaswag.load_items(FIXTURE, 12) == hellaswag.load_items(FIXTURE, 99) == everything


GOOD = json.loads(FIXTURE.read_text(encoding="utf-8").splitlines()[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps({k: v for k, v in GOOD.items() if k != "ctx_b"}), '"ctx_b" is missing'),
        (json.dumps(GOOD | {"label": ""}), '"label" is ""; fix: 0 .. 3'),
        (json.dumps(GOOD | {"endings": ["a", "b"]}), "a list of 4 texts"),
        (json.dumps(GOOD | {"endings": ["a", "b", "[x]", "d"]}), '"endings"[2] has no text'),
        (json.dumps(GOOD | {"ctx_a": None}), '"ctx_a" is null; fix: a text'),
        ("[1, 2]", "list instead of a JSON object"),
        ('{"ind": 3, "activity', "is not JSON"),
        ("[" * 100_000, "has more than 65,536 bytes"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(f"{path}:2") + ".*" + re.escape(message)) as caught:
        hellaswag.load_items(path, 1)
    assert "\n" not in str(caught.value)


def test_a_binary_an_empty_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'{"ctx_a": "\xff\xfe"}\n')
    with pytest.raises(UserError, match=r"items\.jsonl:1 is not UTF-8"):
        hellaswag.load_items(path, 0)
    path.write_bytes(b"\n")
    with pytest.raises(HellaSwagError, match="has no items"):
        hellaswag.load_items(path, 0)
    with pytest.raises(UserError, match="does not exist"):
        hellaswag.load_items(tmp_path / "none.jsonl", 0)


def test_thousands_of_open_brackets_in_a_text_are_read(tmp_path: Path) -> None:
    path, text = tmp_path / "items.jsonl", "[" * 60_000
    path.write_text(json.dumps(GOOD | {"ctx_a": text}), encoding="utf-8")
    assert text in hellaswag.load_items(path, 0)[0].query


# --- which items they were


def rewritten(path: Path, line_end: str = "\n", **changes: object) -> Path:
    """The fixture in other words of JSON: other line ends, keys backwards, spaces, escapes; its first item changed."""
    rows = [json.loads(line) for line in FIXTURE.read_text(encoding="utf-8").splitlines()]
    rows[0] |= changes
    lines = [json.dumps(dict(reversed(row.items())), indent=None, separators=(" , ", " :  ")) for row in rows]
    path.write_bytes("".join(line + line_end for line in lines).encode())
    return path


def test_the_digest_does_not_depend_on_the_layout_of_the_file(tmp_path: Path) -> None:
    second = rewritten(tmp_path / "items.jsonl", "\r\n")
    ours, theirs = hellaswag.load_items(FIXTURE, 5), hellaswag.load_items(second, 5)
    assert hellaswag.digest(ours) == hellaswag.digest(theirs)


def test_any_change_of_an_item_changes_the_digest(tmp_path: Path) -> None:
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
    assert len({hellaswag.digest(found) for found in [items, *others]}) == 1 + len(others)


# --- getting the file

CONTENT = FIXTURE.read_bytes()
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        released: threading.Event = self.server.released
        self.server.requests += 1
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
        """Ignore a client that disconnects; some tests cause it."""

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


def obtain(directory: Path, url: str, timeout_seconds: float = 10.0) -> Path | str:
    return hellaswag.obtain(
        evaluation(), directory, lambda text: None, url=url, timeout_seconds=timeout_seconds, sha256=DIGEST
    )


def test_a_download_is_cached(server: Server, tmp_path: Path) -> None:
    found = obtain(tmp_path / "data", server.url("good"))
    assert found == tmp_path / "data" / "hellaswag_val.jsonl"
    assert found.read_bytes() == CONTENT
    assert obtain(tmp_path / "data", server.url("good")) == found
    assert server.requests == 1
    assert [path.name for path in found.parent.iterdir()] == ["hellaswag_val.jsonl"]


def test_a_file_of_the_user_in_its_place_is_refused_and_stays(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "hellaswag_val.jsonl"
    path.write_bytes(CONTENT[:-9])
    with pytest.raises(HellaSwagError, match=r"not the original.*CONFIG_HELLASWAG_FILE="):
        obtain(tmp_path, server.url("good"))
    assert path.read_bytes() == CONTENT[:-9]


@pytest.mark.parametrize(
    ("path", "timeout_seconds", "reason"),
    [
        ("other", 10, "has SHA-256"),
        ("trickle", 1, "within 1 s"),
    ],
)
def test_a_failed_download_is_recorded_as_absent_with_its_reason(
    server: Server, tmp_path: Path, path: str, timeout_seconds: float, reason: str
) -> None:
    found = obtain(tmp_path, server.url(path), timeout_seconds)
    assert isinstance(found, str)
    assert re.search(reason, found)
    assert "CONFIG_HELLASWAG_FILE" in found
    assert "\n" not in found
    assert list(tmp_path.iterdir()) == []


def test_a_configured_file_is_used_unchanged_and_must_exist(tmp_path: Path) -> None:
    def unused(text: str) -> None:
        raise AssertionError(text)

    assert hellaswag.obtain(evaluation(FIXTURE), tmp_path, unused) == FIXTURE
    with pytest.raises(HellaSwagError, match=r"CONFIG_HELLASWAG_FILE=.*none\.jsonl is not a file"):
        hellaswag.obtain(evaluation(tmp_path / "none.jsonl"), tmp_path, unused)


@given(st.text(alphabet="[]a \n", max_size=30))
def test_brackets_are_removed_as_by_the_harness(text: str) -> None:
    without = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    assert hellaswag.prepare(text) == without.replace("  ", " ")

"""`make serve`: the state of a study over HTTP, on the loopback address, read-only."""

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.system.errors import UserError
from scripts.serve.__main__ import port_number
from scripts.serve.live import MOST_POINTS, Live, LiveCurve
from scripts.serve.server import ADDRESS, StudyServer
from tests.study.sample_records import a_record


def line(iteration: int, loss: object, memory: int = 2**30) -> str:
    event = {
        "event": "train",
        "iteration": iteration,
        "loss": loss,
        "memory_bytes": memory,
        "tokens_per_second": 5.0,
    }
    return json.dumps(event) + "\n"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "x"
    for name, seed in (("B", 0), ("RALEARN", 0)):
        run = folder / "runs" / f"{name}{seed}"
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps(a_record(name, seed, 3.0)))
        (run / "metrics.jsonl").write_text("".join(line(i, 5.0 - i / 100) for i in range(1, 11)))
    (folder / "report.html").write_text("<p>the report</p>")
    (tmp_path / "secret").write_text("not of the study")
    return folder


@pytest.fixture
def server(study: Path) -> Iterator[StudyServer]:
    started = StudyServer(study, 0)
    thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield started
    started.shutdown()
    started.server_close()


def ask(
    server: StudyServer, path: str, method: str = "GET", host: str = "localhost"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(ADDRESS, server.server_address[1], timeout=20)
    connection.request(method, path, headers={"Host": f"{host}:{server.server_address[1]}"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def test_the_state_follows_the_records_and_nothing_is_written(server: StudyServer, study: Path) -> None:
    server.live.seconds = 0.0
    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    status, headers, content = ask(server, "/state.json")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (
        200,
        "application/json",
        "no-store",
    )
    state = json.loads(content)
    assert [run["cells"][0] for run in state["runs"]] == ["B0", "RALEARN0"]
    assert state["runs"][0]["curve"] == [[i, pytest.approx(5.0 - i / 100)] for i in range(1, 11)]
    assert state["runs"][0]["cells"][5] == "1.00 GiB"
    assert {path: path.read_bytes() for path in study.rglob("*") if path.is_file()} == before

    with (study / "runs/B0/metrics.jsonl").open("a") as file:
        file.write(line(11, 4.0, 2**31) + '{"event": "train", "iterat')
    state = json.loads(ask(server, "/state.json")[2])
    assert state["runs"][0]["curve"][-1] == [11, 4.0]
    assert state["runs"][0]["cells"][5] == "2.00 GiB"


def test_three_names_are_served_and_nothing_else(server: StudyServer, study: Path) -> None:
    assert b"<title>x</title>" in ask(server, "/")[2]
    assert ask(server, "/report.html")[2] == b"<p>the report</p>"
    assert ask(server, "/", "HEAD")[2] == b""
    for path in (
        "/runs/B0/run.json",
        "/../secret",
        "/..%2fsecret",
        "//secret",
        "/report.html/../../../secret",
        "/.config",
    ):
        status, _, content = ask(server, path)
        assert status == 404
        assert b"not of the study" not in content
    (study / "report.html").unlink()
    (study / "report.html").symlink_to(study.parents[1] / "secret")
    assert ask(server, "/report.html")[0] == 404


def test_other_methods_and_other_hosts_are_refused(server: StudyServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(server, "/state.json", method)[0] == 501
    assert ask(server, "/state.json", host="evil.example")[0] == 403
    assert server.server_address[0] == "127.0.0.1"


def test_a_damaged_plan_is_one_line_and_the_server_goes_on(server: StudyServer, study: Path) -> None:
    server.live.seconds = 0.0
    (study / "plan.json").write_text("{")
    status, _, content = ask(server, "/state.json")
    assert status == 503
    assert b"plan.json" in content
    (study / "plan.json").unlink()
    assert ask(server, "/state.json")[0] == 200


def test_a_study_without_runs_that_started_has_a_state(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert Live(tmp_path).state()["runs"] == []


def test_a_port_in_use_and_a_bad_port_are_one_line(server: StudyServer, study: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be used: .*; fix: PORT=another one"):
        StudyServer(study, server.server_address[1])
    for text in ("", "-1", "70000", "http", "²"):
        with pytest.raises(UserError, match="is not a port; fix"):
            port_number(text)


@given(cuts=st.lists(st.integers(0, 60_000), max_size=4), count=st.integers(1, 2000))
@settings(max_examples=30, deadline=None)
def test_a_curve_read_in_any_pieces_is_that_of_one_reading(
    cuts: list[int], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("curve")
    content = "".join(line(i, 1.0 / i) for i in range(1, count + 1)).encode()
    whole = LiveCurve(folder / "whole")
    whole.path.write_bytes(content)
    whole.update()
    grown = LiveCurve(folder / "grown")
    for cut in sorted(cuts):
        grown.path.write_bytes(content[:cut])
        grown.update()
    grown.path.write_bytes(content)
    grown.update()
    assert grown.points == whole.points
    assert len(whole.points) < 2 * MOST_POINTS
    iterations = [point[0] for point in whole.points]
    assert iterations == sorted(set(iterations))
    mean = sum(1.0 / i for i in range(1, int(iterations[-1]) + 1)) / iterations[-1]
    assert sum(loss for _, loss in whole.points) / len(whole.points) == pytest.approx(mean)
    shutil.rmtree(folder)


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    curve = LiveCurve(tmp_path / "metrics.jsonl")
    curve.path.write_text("".join(line(i, float(i)) for i in range(1, 10)))
    curve.update()
    with curve.path.open("a") as file:
        file.write("not JSON\n" + line(6, 60.0) + line(7, float("nan")))
    curve.update()
    assert [point[0] for point in curve.points] == [1, 2, 3, 4, 5, 6, 7]
    assert curve.points[5] == [6, 60.0]
    curve.path.write_text(line(1, 3.0))  # a new file
    curve.update()
    assert curve.points == [[1, 3.0]]

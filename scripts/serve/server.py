"""A read-only server on this machine's loopback address: one page, its state as JSON, and the study's report."""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from gpt2.system.errors import UserError
from scripts.serve.live import Live
from scripts.serve.page import live_page

ADDRESS = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")  # another name in Host is a page elsewhere that was pointed here


class StudyServer(ThreadingHTTPServer):
    """Serves three names and no file tree. UserError where the port cannot be used."""

    daemon_threads = True

    def __init__(self, study_dir: Path, port: int) -> None:
        self.live, self.lock, self.study_dir = Live(study_dir), Lock(), study_dir
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise UserError(f"port {port} cannot be used: {error.strerror}; fix: PORT=another one") from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def content(self, path: str) -> tuple[str, bytes] | None:
        """Return type and content of a name; None for any other."""
        if path == "/":
            return "text/html; charset=utf-8", live_page(self.study_dir.name).encode()
        if path == "/state.json":
            with self.lock:
                return "application/json", self.live.json()
        report = self.study_dir / "report.html"
        if path == "/report.html" and report.is_file() and not report.is_symlink():
            return "text/html; charset=utf-8", report.read_bytes()
        return None


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD alone; the base class refuses other methods."""

    server: StudyServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "study", ""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 and localhost only")
            return
        try:
            found = self.server.content(self.path.partition("?")[0])
        except (UserError, OSError) as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, " ".join(str(error).split())[:200])
            return
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, body = found
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page asks every few seconds."""

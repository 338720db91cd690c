"""Drive Chromium by its DevTools protocol over a pipe, without a further package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")
LONGEST = 120  # seconds to wait for an answer


class Chromium:
    """One page of a browser. The events of the protocol are collected in `events`."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")[
            "targetId"
        ]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(20)
        os.close(self.commands)
        os.close(self.answers)

    def call(self, method: str, **params: Any) -> Any:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            assert select.select([self.answers], [], [], LONGEST)[0], "the browser does not answer"
            part = os.read(self.answers, 1 << 20)
            assert part, "the browser ended"
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=page.as_uri())
        self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, also of a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def faults(self) -> list[str]:
        """Return the errors and warnings of the page."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"])[:500] for event in self.events if event.get("method") in kinds]

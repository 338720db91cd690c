"""Workers: a station in a process of its own, or in a thread of this process. Both take one request at a time."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from numerics.errors import NumericsError
from numerics.seed import process_environment
from numerics.stress.station import Flip, Station, device_kind

PATIENCE_SECONDS = 600.0  # for an answer; a device that hangs is reported


class DeviceLostError(NumericsError):
    """A device gave no answer."""


class DeviceWorker(Protocol):
    """A device. request: the name of a method of Station with its arguments; answer: waits for its result."""

    name: str
    kind: str

    def request(self, method: str, *arguments: Any) -> None: ...

    def answer(self) -> Any: ...

    def close(self) -> None: ...


class ThreadWorker:
    """A station in a thread of this process."""

    def __init__(self, name: str, station: Station) -> None:
        self.name, self.station, self.kind = name, station, device_kind(station.device)
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[Any] | None = None

    def request(self, method: str, *arguments: Any) -> None:
        self._future = self._pool.submit(_call, self.station, method, arguments)

    def answer(self) -> Any:
        assert self._future
        return self._future.result()

    def close(self) -> None:
        self._pool.shutdown()


class ProcessWorker:
    """A station in a process of its own, so that a device that fails or hangs ends no other one."""

    def __init__(
        self, name: str, device: str, threads: int, memory_bytes: int | None = None, fault: Flip | None = None
    ) -> None:
        self.name, self.kind = name, ""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = dict(os.environ)
        os.environ.update(process_environment(before))  # cuBLAS reads its variable when it is loaded
        try:
            self._process = context.Process(
                target=_serve, args=(theirs, device, threads, memory_bytes, fault), daemon=True
            )
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def start(self) -> None:
        """Wait until the device is ready."""
        try:
            self.kind = self.answer()
        except DeviceLostError as error:
            raise NumericsError(
                f"{error}; fix: name devices that torch can use, such as --devices cpu"
            ) from error

    def request(self, method: str, *arguments: Any) -> None:
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise self._lost() from error

    def answer(self) -> Any:
        try:
            if not self._pipe.poll(PATIENCE_SECONDS):
                raise DeviceLostError(f"{self.name} gave no answer for {PATIENCE_SECONDS:g} s")
            content = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        result = torch.load(io.BytesIO(content), weights_only=False)  # of the process that this one started
        if isinstance(result, Exception):
            raise DeviceLostError(f"{self.name} failed: {type(result).__name__}: {result}") from result
        return result

    def _lost(self) -> DeviceLostError:
        self._process.join(5)
        return DeviceLostError(f"{self.name} ended with exit status {self._process.exitcode}")

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def _call(station: Station, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "elect":
        station.golden = {name: 0 for name, kernel in station.kernels.items() if kernel.exact} | arguments[0]
        return None
    return getattr(station, method)(*arguments)


def _serve(pipe: Any, device: str, threads: int, memory_bytes: int | None, fault: Flip | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process

    def send(result: Any) -> None:
        content = io.BytesIO()
        torch.save(result, content)
        pipe.send_bytes(content.getvalue())

    try:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        station = Station(device, memory_bytes, fault)
        send(device_kind(device))
    except Exception as error:
        send(RuntimeError(f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            send(_call(station, method, arguments))
        except Exception as error:
            send(RuntimeError(f"{type(error).__name__}: {error}"))

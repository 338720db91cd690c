"""The recorder with the interface and the config.json of msProbe's PrecisionDebugger, section 4.3."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from referee.errors import NumericsError
from referee.numerics.dump_files import read_json
from referee.numerics.record.record_settings import RecorderConfig
from referee.numerics.record.recorder import Recorder


class PrecisionDebugger:
    """Record steps as config.json says. start, stop and step also work as class methods of the latest instance.

    NumericsError where config.json cannot be read or used.
    """

    _latest: PrecisionDebugger | None = None

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Sequence[int] | None = None,
    ) -> None:
        content = read_json(config_path, "correct it") if config_path is not None else {}
        folder = None if dump_path is None else os.fspath(dump_path)
        try:
            config = RecorderConfig.from_json(content, task=task, dump_path=folder, level=level, step=step)
        except NumericsError as error:
            where = f"{config_path}: " if config_path is not None else ""
            raise NumericsError(f"{where}{error}") from error
        self.recorder = Recorder(config)
        PrecisionDebugger._latest = self

    @classmethod
    def start(cls, model: nn.Module | Sequence[nn.Module] | None = None, **unused: Any) -> None:
        cls._recorder().start(model)

    @classmethod
    def stop(cls) -> None:
        cls._recorder().stop()

    @classmethod
    def step(cls) -> None:
        cls._recorder().step()

    @classmethod
    def _recorder(cls) -> Recorder:
        if cls._latest is None:
            raise NumericsError("there is no PrecisionDebugger; fix: create one before start()")
        return cls._latest.recorder

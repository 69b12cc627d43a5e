"""Writes the flight recorder's steps down, when workers fail and when somebody asks."""

import asyncio
from pathlib import Path

import structlog

from scheduler_service.engine.causes import EpochEnd
from scheduler_service.engine.flight import FlightRecorder
from scheduler_service.engine.recovery import Epoch
from scheduler_service.rpc.flight_file import recording, write
from stepwire.v1 import flight_pb2

_log = structlog.stdlib.get_logger(__name__)


class FlightLog:
    """Recordings of one worker group, in a folder. An EpochObserver: an epoch that ends is written down."""

    def __init__(self, recorder: FlightRecorder, folder: str) -> None:
        self._recorder = recorder
        self._folder = Path(folder).expanduser()
        self._writing: asyncio.Task[None] | None = None

    def epoch_began(self, _epoch: Epoch) -> None:
        """Nothing to do: the recorder has begun anew."""

    def epoch_ended(self, end: EpochEnd) -> None:
        """Writes the steps down, while what they refer to is as it was; the file is written in a thread."""
        if self._recorder.steps():
            self._writing = asyncio.create_task(self._write(recording(self._recorder, end.epoch, end.error.message)))

    async def _write(self, message: flight_pb2.FlightRecording) -> None:
        """Logs the file's path; a folder that cannot be written to is a log record too, and no more."""
        try:
            path = await asyncio.to_thread(write, message, self._folder)
        except OSError as error:
            _log.warning("flight_not_written", folder=str(self._folder), error=error.strerror or str(error))
            return
        _log.info(
            "flight_written",
            path=str(path),
            steps=len(message.steps),
            epoch=message.header.epoch,
            replay=f"stepwire replay {path}",
        )

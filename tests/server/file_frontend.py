"""A real HTTP server that offers files and uploads of OpenAI's API and nothing else, on the loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batchmill.children.programs import Programs
from batchmill.config import ServerEntry
from batchmill.dialects.openai import errors, files
from batchmill.engines.clock import SystemClock
from batchmill.server.admission_control import Admission
from batchmill.server.auth import Gate, Hosts
from batchmill.server.connection import Listener, bind, url_of
from batchmill.server.http import HttpRoot
from batchmill.services.files.files import FileService
from batchmill.services.files.uploads import UploadService
from batchmill.services.keys import KeyService
from batchmill.store.sql.database import Database


class FileDialect:
    """The part of OpenAI's dialect that needs no jobs and no models."""

    name = "openai"
    refusal = staticmethod(lambda error: errors.refusal(error, error.message))
    error_schema = staticmethod(errors.schema)

    def __init__(self, services: Any) -> None:
        self._services = services

    def operations(self) -> list[Any]:
        return [*files.operations(self._services), *files.upload_operations(self._services)]


@dataclass
class FileDoor:
    url: str
    data_dir: Path
    database: Database
    files: FileService
    uploads: UploadService
    keys: KeyService

    def left(self) -> list[str]:
        """The names of all files below files/, apart from those that have a record."""
        home = self.data_dir / "files"
        return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


@contextlib.asynccontextmanager
async def open_file_frontend(
    data_dir: Path, limits: ServerEntry = ServerEntry(), clock: Any = None
) -> AsyncIterator[FileDoor]:
    clock = clock or SystemClock()
    data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(data_dir / "batchmill.db")
    file_service = FileService(database, data_dir, clock, limits)
    upload_service = UploadService(database, file_service, clock)
    keys = KeyService(database, clock)
    services = SimpleNamespace(files=file_service, uploads=upload_service, config=SimpleNamespace(server=limits))
    dialect = FileDialect(services)
    programs = Programs(clock)
    root = HttpRoot(
        [dialect],
        fallback=dialect,
        gate=Gate(keys, clock),
        hosts=Hosts("127.0.0.1"),
        clock=clock,
        admission=Admission(limits, files=1024, clock=asyncio.get_running_loop().time),
        programs=programs,
    )
    sock = bind("127.0.0.1", 0)
    listener = Listener(root, sock, root=root, drain_s=1)
    await listener.open()
    try:
        yield FileDoor(url_of(sock), data_dir, database, file_service, upload_service, keys)
    finally:
        await listener.close()
        await root.close()
        await programs.close()
        file_service.close()
        database.close()

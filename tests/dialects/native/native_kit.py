"""The native dialect over real services that have no jobs yet: enough to ask what it offers and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fakes.held_clock import HeldClock

from batchmill.config import Config, ModelEntry, ProjectEntry
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.files.files import FileService
from batchmill.services.keys import KeyService
from batchmill.services.project_jobs import ProjectJobs
from batchmill.services.services import Services
from batchmill.store.sql.database import Database

CODE = "def f(text):\n    return text\n"


class Kit:
    def __init__(self, folder: Path) -> None:
        (folder / "app.py").write_text(CODE)
        function = ModelEntry(engine="function", source="app.py:f")
        service = ModelEntry(engine="openai", source="s", base_url="http://127.0.0.1:9/v1", adapters={"legal": "legal"})
        self.config = Config(
            data_dir=folder, base=folder, models={"f": function, "far": service},
            projects={"small": ProjectEntry(models=["legal"]), "open": ProjectEntry(templates=True)},
        )  # fmt: skip
        self.clock = HeldClock()
        self.database = Database(folder / "batchmill.db")
        self.files = FileService(self.database, folder, self.clock, self.config.server)
        directory = ModelDirectory(ConfiguredModels(self.config))
        nothing: Any = None
        self.services = Services(
            jobs=ProjectJobs(nothing, self.files, directory), repeats=nothing, files=self.files, uploads=nothing,
            keys=KeyService(self.database, self.clock), directory=directory, live=nothing, webhooks=nothing,
            links=nothing, datasets=nothing, adapters=nothing, llms=nothing,
            functions=nothing, versions=nothing, late=nothing, vault=nothing, connectors=nothing, groups=nothing,
            remote_models=nothing, remote_tasks=nothing, programs=nothing,
            config=self.config, clock=self.clock, stopping=asyncio.Event(),
        )  # fmt: skip

    def close(self) -> None:
        self.files.close()
        self.database.close()

    async def stored(self, filename: str = "rows.jsonl", project: str = "default", **fields: Any) -> str:
        """The id of a new file."""
        writer = await self.files.writer(project)
        await writer.write(b"{}\n")
        return (await writer.commit(**{"purpose": "batch", "filename": filename, **fields})).id

"""Files and uploads over a real database, with a clock that stands still."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from fakes.databases import open_database
from fakes.held_clock import HeldClock

from batchmill.config import ServerEntry
from batchmill.jobs.ledger import snapshot
from batchmill.services.files.files import FileService
from batchmill.services.files.records import FileRecord
from batchmill.services.files.uploads import NewUpload, UploadService
from batchmill.states import JobState
from batchmill.store.file_log import FileLog
from batchmill.store.sql.tables import jobs
from batchmill.store.stored_files import LocalFiles
from batchmill.types import DatasetSpec, JobView, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

JOB = "job_" + "0" * 20


class FileRoom:
    """A data directory as a server has it. `reopen` is what a restart does."""

    def __init__(self, data_dir: Path, **limits: int) -> None:
        self.data_dir, self.clock = data_dir, HeldClock()
        self.limits = ServerEntry(**limits)
        self.open()

    def open(self) -> None:
        self.database = open_database(self.data_dir / "batchmill.db")
        self.log = FileLog(self.database, self.data_dir)
        stored = LocalFiles(self.log)
        self.files = FileService(self.database, self.data_dir, self.clock, self.limits, stored=stored)
        self.uploads = UploadService(self.database, self.files, self.clock)

    def close(self) -> None:
        self.files.close()
        self.database.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def left(self) -> list[str]:
        """Every file below files/."""
        home = self.data_dir / "files"
        return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())

    async def upload(self, data: bytes = b"{}\n", project: str = "one", **fields) -> FileRecord:
        writer = await self.files.writer(project)
        try:
            await writer.write(data)
            return await writer.commit(**{"purpose": "batch", "filename": "rows.jsonl", **fields})
        finally:
            await writer.discard()

    async def begin(self, size: int, project: str = "one", **fields) -> str:
        """The id of a new upload of so many bytes."""
        new = NewUpload("batch", "rows.jsonl", "text/jsonl", size, **fields)
        return (await self.uploads.create(project, new)).id

    async def part(self, upload_id: str, data: bytes, project: str = "one") -> str:
        writer = await self.uploads.part_writer(project, upload_id)
        try:
            await writer.write(data)
            return (await writer.commit()).id
        finally:
            await writer.discard()

    async def read(self, record: FileRecord) -> bytes:
        file = await self.files.open(record)
        try:
            return await file.read(0, file.size_bytes)
        finally:
            await file.close()

    async def put_job(self, state: JobState, *, reads: str = "nothing", job_id: str = JOB, **fields) -> JobView:
        """A job in the ledger, as far as files have to do with it; its view."""
        spec = JobSpec(
            id=job_id, dataset=DatasetSpec(paths=[reads]), models=[ModelSpec("m", "function", "a.py:f")],
            form=OpenAIForm(), policy=Policy(), output=None, identity="", code={}, created=self.clock.now(),
            project="one", origin={"frontend": "openai"},
        )  # fmt: skip

        def put(db: sa.Connection) -> None:
            db.execute(jobs.delete().where(jobs.c.id == job_id))
            snapshot.insert_job(db, spec)
            kept = {key: fields[key] for key in ("output", "errors_output", "generation") if key in fields}
            db.execute(jobs.update().where(jobs.c.id == job_id).values(state=state, **kept))

        await self.database.write(put)
        return JobView(id=job_id, state=state, project="one", finished=self.clock.now(), **fields)

    async def ended_job(self, state: JobState = JobState.COMPLETED, generation: int = 0, **fields) -> JobView:
        """A job with both result files where jobs keep them."""
        home = self.data_dir / "jobs" / JOB
        home.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "results.errors.jsonl"):
            part = home / f"{name}.part"
            part.write_text(f"{name} {generation}\n")
            part.rename(home / name)
        paths = {"output": str(home / "results.jsonl"), "errors_output": str(home / "results.errors.jsonl")}
        return await self.put_job(state, generation=generation, **{**paths, "rows_ok": 1, "rows_failed": 1, **fields})

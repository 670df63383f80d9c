"""What a project may have: every quota, at its number and one beyond, with many that come at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.databases import open_database
from fakes.held_clock import HeldClock
from file_room import JOB
from llm_room import CONFIG, ScriptedEngines
from remote_room import connector_fields

from batchmill.config import ServerEntry, load
from batchmill.errors import InvalidConfig, OverQuota
from batchmill.jobs.ledger import records
from batchmill.jobs.ledger import records as submissions
from batchmill.jobs.pools.quarantine import Quarantine
from batchmill.models.addresses import read_private
from batchmill.services.adapters import records as adapter_records
from batchmill.services.adapters.records import AdapterRecord
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.files.files import FileService
from batchmill.services.files.uploads import NewUpload, UploadService
from batchmill.services.functions.calls import VersionTarget
from batchmill.services.functions.deploying import VersionBuilder
from batchmill.services.functions.late_replies import LateCallOptions, LateReplies
from batchmill.services.functions.versions import ModelVersions
from batchmill.services.keys import KeyService
from batchmill.services.links import LinkService, SignedLink
from batchmill.services.llms.service import LlmService
from batchmill.services.named_datasets import DatasetService
from batchmill.services.remote.job_tasks import JobTasks
from batchmill.services.remote.remote_services import make_remote
from batchmill.services.remote.task_records import DEPLOY_MODEL, RUNNING
from batchmill.services.remote.tasks import RemoteTasks
from batchmill.services.repeats import RepeatedOrders
from batchmill.services.secrets.box import SecretBox
from batchmill.services.secrets.vault import Vault
from batchmill.services.usage import usage
from batchmill.services.webhooks.endpoints import WebhookService
from batchmill.services.webhooks.sender import WebhookSender
from batchmill.types import (
    Caller,
    DatasetSpec,
    Interface,
    LlmSettings,
    ModelSpec,
    Policy,
    ProjectQuotas,
    Quotas,
    Scope,
    Tensor,
)
from batchmill.wire import bundles
from batchmill.wire.bundles import DeployOrder
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

MOST, OTHERS = 3, 1
TARGET = VersionTarget("f", "main", 1, ModelSpec("m", "function", "s"))
SPEC = JobSpec(JOB, DatasetSpec(["x"]), [], OpenAIForm(), Policy(), None, "i", {}, 0.0, origin={"frontend": "openai"})


class Room:
    """Everything that a project makes something with, over one database; of `quota` it may have few."""

    def __init__(self, folder: Path, quota: str) -> None:
        folder.mkdir()
        own = f"\n[quotas]\n{quota} = {MOST}\n[projects.other.quotas]\n{quota} = {OTHERS}\n"
        (folder / "batchmill.toml").write_text(CONFIG + own)
        config = load(environ={"HOME": str(folder)}, cwd=folder, data_dir=str(folder))
        clock, self.quotas = HeldClock(), config.project_quotas
        box = SecretBox(folder / "secrets.key")
        self.database = database = open_database(folder / "batchmill.db")
        directory = ModelDirectory(ConfiguredModels(config))
        self.vault = Vault(database, box, clock, self.quotas)
        self.keys = KeyService(database, clock, self.quotas)
        self.remote = make_remote(config, database, self.vault, clock, directory)
        jobs = JobTasks(database, None, RepeatedOrders(database, clock), self.quotas)  # type: ignore[arg-type]  # no task here has a job
        self.tasks = RemoteTasks(
            database, self.remote.models, self.remote.calls, jobs, clock=clock, entry=config.ml_commons
        )  # fmt: skip
        self.files = FileService(database, folder, clock, config.server, self.quotas)
        self.uploads = UploadService(database, self.files, clock)
        self.links = LinkService(database, clock, box, self.quotas)
        self.datasets = DatasetService(database, self.files, self.links, clock, config)
        self.webhooks = WebhookService(database, clock, config, box)
        engines = ScriptedEngines()
        self.llms = LlmService(
            database, self.vault, directory, clock, engines=engines, calls=engines, quarantine=Quarantine(clock)
        )
        self.folder = folder
        self.versions = ModelVersions(
            database, clock, directory, builder=VersionBuilder(folder, _tried), quotas=self.quotas
        )
        self.late = LateReplies(database, clock, None, WebhookSender(clock, read_private([])), self.quotas)  # type: ignore[arg-type]

    async def file(self, project: str) -> None:
        writer = await self.files.writer(project)
        try:
            await writer.commit(purpose="batch", filename="f")
        finally:
            await writer.discard()

    async def close(self) -> None:
        await self.remote.close()
        await self.datasets.close()
        self.files.close()
        self.webhooks.close()
        self.database.close()


async def _tried(spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
    return Interface(inputs=[Tensor("x")])


async def _function(room: Room, caller: Caller, n: int) -> None:
    path = room.folder / f"{caller.project}{n}.tar.gz"
    with path.open("wb") as out:
        bundles.write(out, DeployOrder(f"{caller.project}_{n}", "app.py:f"), {"app.py": b"def f(x): ..."})
    await room.versions.deploy(path, by=caller)


def _adapter(room: Room, caller: Caller, n: int) -> Awaitable[Any]:
    record = AdapterRecord(f"{caller.project}-{n}", caller.project, f"a{n}", 0, "tiny", "s")
    return room.database.write(adapter_records.begin, record, room.quotas.of(caller.project).adapters)


def _job(room: Room, caller: Caller, n: int) -> Awaitable[Any]:
    spec = msgspec.structs.replace(SPEC, id=f"job_{caller.project}_{n}", project=caller.project)
    return room.database.write(submissions.enter, spec, None, room.quotas.of(caller.project).unfinished_jobs)


MAKE: dict[str, Callable[[Room, Caller, int], Awaitable[Any]]] = {
    "keys": lambda room, who, n: room.keys.create(name="n", project=who.project, scope=Scope.READ),
    "secrets": lambda room, who, n: room.vault.change({f"llm/{who.project}{n}/hf_token": "v"}, project=who.project),
    "connectors": lambda room, who, n: room.remote.connectors.create(who, connector_fields()),
    "remote_models": lambda room, who, n: room.remote.models.register(
        who, {"name": "m", "function_name": "remote", "connector": connector_fields()}
    ),
    "model_groups": lambda room, who, n: room.remote.groups.register(who, {"name": f"g{n}"}),
    "remote_tasks": lambda room, who, n: room.tasks.record(who, "m", DEPLOY_MODEL, RUNNING),
    "unfinished_jobs": _job,
    "files": lambda room, who, n: room.file(who.project),
    "uploads": lambda room, who, n: room.uploads.create(who.project, NewUpload("batch", "f", "", 3)),
    "datasets": lambda room, who, n: room.datasets.begin(who.project, "f.jsonl"),
    "adapters": _adapter,
    "llm_deployments": lambda room, who, n: room.llms.create(who, f"d{n}", LlmSettings("small")),
    "functions": _function,
    "webhook_endpoints": lambda room, who, n: room.webhooks.create(
        who.project, name="x", url="https://example.com/", event_types=["batch.completed"]
    ),
    "late_calls": lambda room, who, n: room.late.store_call(
        who,
        VersionTarget("f", "main", 1, ModelSpec("m", "function", "s")),
        b"{}",
        LateCallOptions("modelbit", "rows", "https://example.com/", "id"),
    ),
    "used_links": lambda room, who, n: room.database.write(
        room.links.use, SignedLink(f"{who.project}{n}", who.project, 9e9)
    ),
}


async def test_every_quota_holds_when_many_come_at_once(tmp_path: Path) -> None:
    """Of many that a project makes at once, of anything, as many come to be as its quota says; the others are told the
    quota's name and the way out. What one project has takes nothing from another, which may have a quota of its own."""
    assert set(MAKE) | {"disk"} == set(Quotas.__struct_fields__)
    for quota, make in MAKE.items():
        room = Room(tmp_path / quota, quota)
        for project, most in (("default", MOST), ("other", OTHERS)):
            who = Caller(project, Scope.ADMIN)
            tries = [make(room, who, n) for n in range(MOST + 4)]
            made = await asyncio.gather(*tries, return_exceptions=True)
            refused = [each for each in made if isinstance(each, BaseException)]
            assert len(made) - len(refused) == most, (quota, made)
            for each in refused:
                assert isinstance(each, OverQuota), (quota, each)
                assert each.code == "quota_exceeded" and f"projects.{project}.quotas.{quota}" in each.message
        await room.close()


async def test_a_removed_version_makes_room(tmp_path: Path) -> None:
    """Versions that were removed count no more, a restart makes one more, and whoever runs the machine is not held."""
    room = Room(tmp_path / "room", "functions")
    who = Caller("default", Scope.DEPLOY)
    for n in range(MOST):
        await _function(room, who, n)
    with pytest.raises(OverQuota):
        await room.versions.restart("default_0", by=who)
    await room.versions.remove("default_1", by=who)
    assert (await room.versions.restart("default_0", by=who)).number == 2
    assert (await room.versions.restart("default_0")).number == 3
    await room.close()


async def test_a_job_that_is_tried_again_counts(tmp_path: Path) -> None:
    """A retry opens a job that had ended: it needs a place among the unfinished ones too."""
    room = Room(tmp_path / "room", "unfinished_jobs")
    for n in range(MOST):
        await _job(room, Caller("default", Scope.ADMIN), n)
    with pytest.raises(OverQuota):
        await room.database.write(records.refuse_unfinished, "default", MOST)
    await room.close()


@pytest.mark.once
def test_quotas_are_read(tmp_path: Path) -> None:
    """A project's own quotas stand in the place of those of all; what cannot be is refused by its name."""

    def read(text: str):
        (tmp_path / "batchmill.toml").write_text(text)
        return load(environ={"HOME": str(tmp_path)}, cwd=tmp_path).project_quotas

    quotas = read('[quotas]\nkeys = 5\n[projects.a.quotas]\nfiles = 0\ndisk = "10%"')
    assert (quotas.of("a").keys, quotas.of("a").files, quotas.of("b").files) == (5, 0, Quotas().files)
    assert quotas.of("a").disk_bytes(1000) == 100
    for text, case in (
        ("[quotas]\nkey = 1", "did you mean quotas.keys"),
        ("[projects.a.quotas]\nkey = 1", "did you mean projects.a.quotas.keys"),
        ("[quotas]\nkeys = -1", "quotas.keys must be 0 to"),
        ('[projects.a.quotas]\nkeys = "x"', "projects.a.quotas"),
        ('[quotas]\ndisk = "0%"', "quotas.disk must be 1% to 100%"),
        ('[projects.a.quotas]\ndisk = "much"', "projects.a.quotas.disk"),
    ):
        with pytest.raises(InvalidConfig, match=case):
            read(text)


async def test_the_disk_is_counted_while_it_is_written(tmp_path: Path) -> None:
    """Of uploads that arrive at once no more than the quota ever lies there; what was dropped or deleted is free again,
    and an upload whose announced bytes do not fit is refused before any of them comes."""
    room = Room(tmp_path / "room", "disk")
    quota, piece = 100_000, b"x" * 1000
    files = FileService(
        room.database, tmp_path / "room", HeldClock(), ServerEntry(), ProjectQuotas(Quotas(disk=quota))
    )  # fmt: skip
    uploads = UploadService(room.database, files, HeldClock())

    async def send(count: int) -> str | OverQuota:
        writer = await files.writer("one")
        try:
            for _ in range(count):
                await writer.write(piece)
                await asyncio.sleep(0)
            return (await writer.commit(purpose="batch", filename="f")).id
        finally:
            await writer.discard()

    sent = await asyncio.gather(*(send(30) for _ in range(8)), return_exceptions=True)
    stored = [each for each in sent if isinstance(each, str)]
    assert all(isinstance(each, str | OverQuota) for each in sent)
    assert (await files.disk_quota.usage("one"))[0] == 30_000 * len(stored) <= quota
    for each in stored:
        await files.delete("one", each, "ada")
    whole = await send(100)
    with pytest.raises(OverQuota, match="quotas.disk"):
        await send(1)
    with pytest.raises(OverQuota):
        await uploads.create("one", NewUpload("batch", "f", "", 1))
    await files.delete("one", whole, "ada")
    upload = (await uploads.create("one", NewUpload("batch", "f", "", quota))).id
    part = await uploads.part_writer("one", upload)
    for _ in range(100):
        await part.write(piece)
    made = await part.commit()
    await part.discard()
    await uploads.complete("one", upload, part_ids=[made.id])  # the parts are the file: they need no room of their own
    assert (await files.disk_quota.usage("one"))[0] == quota
    assert (await files.disk_quota.usage("two"))[0] == 0
    files.close()
    await room.close()


async def test_usage_tells_what_the_quotas_count(tmp_path: Path) -> None:
    """What is told of a project's use is what its quotas are held against, for each of them."""
    for quota, make in MAKE.items():
        room = Room(tmp_path / quota, quota)
        for n in range(2):
            await make(room, Caller("default", Scope.ADMIN), n)
        found = {each.quota: (each.used, each.most) for each in await usage(room.files.disk_quota, "default", 0.0)}
        assert set(found) == set(Quotas.__struct_fields__)
        assert found[quota] == (2, MOST)
        await room.close()

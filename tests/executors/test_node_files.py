"""What a worker on a node has of a data directory that it does not see, without a cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchmill.errors import ModelFailed, StorageFailed
from batchmill.executors.ray import frames, node_files
from batchmill.executors.ray.frames import Left, LeftSegment, NodeOrder
from batchmill.executors.ray.node_cache import LOCK, NEW, WORK, NodeCache, cache_folder, collect
from batchmill.executors.ray.node_channel import NodeChannel
from batchmill.executors.ray.node_files import LIVE, NodeFiles
from batchmill.executors.ray.shared_store import keep_left
from batchmill.object_store.credentials import joined, on_nodes
from batchmill.store import folder_objects
from batchmill.store.objects import StoreObjects
from batchmill.types import Isolation, Lease, ModelSpec, OutputSchema, SchemaVersion, SegmentPlace
from batchmill.types.calls import LiveRequest
from batchmill.types.connectors import Provision, Storage
from batchmill.wire import messages
from batchmill.wire.messages import (
    Answered,
    AnswerLive,
    Failed,
    Grant,
    Open,
    Provide,
    Released,
    Revoke,
    Start,
    StoredFile,
)
from batchmill.wire.rows.forms import TableForm

DATA_DIR = "/data-of-the-owner"  # which does not exist


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def put(store: str, folder: Path, key: str, text: str) -> StoredFile:
    """A folder of the data directory with one file, as the owner publishes it."""
    made = folder / "made" / key
    made.mkdir(parents=True)
    (made / "text").write_text(text)
    size = folder_objects.put(StoreObjects(store), f"{key}/0001/", made)
    return StoredFile(f"{DATA_DIR}/{key}", f"{key}/0001/", size)


def cache_of(store: str, folder: Path, cache_bytes: int = 1000) -> NodeCache:
    return NodeCache(cache_folder(str(folder / "cache"), store), StoreObjects(store), cache_bytes)


def test_copies_that_are_used_stay(store: str, tmp_path: Path) -> None:
    """Beyond its size the cache loses copies that nobody uses, never one that somebody holds; it is brought again."""
    first, second, third = (put(store, tmp_path, f"jobs/{n}/dataset", n * 60) for n in "abc")
    cache, other = cache_of(store, tmp_path, 100), cache_of(store, tmp_path, 100)
    place, fd = cache.hold(first)
    assert place == other.hold(first)[0] and place.parts[-3:] == ("jobs", "a", "dataset")
    unused, unused_fd = cache.hold(second)
    os.close(unused_fd)
    cache.hold(third)
    assert (place / "text").read_text() == "a" * 60 and not unused.exists()
    os.close(fd)
    assert (cache.hold(second)[0] / "text").read_text() == "b" * 60


def test_a_damaged_object_is_no_copy(store: str, tmp_path: Path) -> None:
    """What is not what was put is refused, and nothing of it stays."""
    file = put(store, tmp_path, "files/f", "x" * 300_000)  # too long for the manifest
    part = tmp_path / "store" / "files" / "f" / "0001" / "0-000000"
    part.write_bytes(b"y" * 300_000)
    with pytest.raises(StorageFailed, match="another digest"):
        cache_of(store, tmp_path).hold(file)
    part.write_bytes(b"x" * 300_000)
    assert (cache_of(store, tmp_path).hold(file)[0] / "text").stat().st_size == 300_000


def test_workers_of_a_node_fetch_a_file_once(store: str, tmp_path: Path) -> None:
    """Workers that need the same file at once wait for the one that fetches it; what a killed one began is no copy."""
    file = put(store, tmp_path, "jobs/a/dataset", "rows")
    gets: list[str] = []

    class Counted(StoreObjects):
        def get(self, name: str, **more: Any) -> bytes:
            gets.append(name)
            return super().get(name, **more)

    caches = [NodeCache(cache_folder(str(tmp_path / "cache"), store), Counted(store), 1000) for _ in range(8)]
    place, fd = caches[0].hold(file)
    os.close(fd)
    shutil.rmtree(place.parents[2])
    begun = place.parents[2].with_name(place.parents[2].name + WORK)
    (begun / "content").mkdir(parents=True)
    (begun / "content" / "text").write_text("ro")
    gets.clear()
    with ThreadPoolExecutor(len(caches)) as threads:
        held = list(threads.map(lambda cache: cache.hold(file), caches))
    assert {path for path, _ in held} == {place} and (place / "text").read_text() == "rows"
    assert len(gets) == 1 and not begun.exists()
    for _, each in held:
        os.close(each)


def test_a_cache_that_others_read_is_refused(store: str, tmp_path: Path) -> None:
    """A folder that is open to others is not used, and the sentence names the way out."""
    cache_folder(str(tmp_path / "cache"), store).chmod(0o755)
    with pytest.raises(ModelFailed, match=r"open to nobody else \(chmod 700\)"):
        cache_folder(str(tmp_path / "cache"), store)


@pytest.fixture
def files(store: str, tmp_path: Path) -> Iterator[NodeFiles]:
    yield NodeFiles(NodeOrder(Storage(store), str(tmp_path / "cache"), 1000, DATA_DIR), "w1")


def opened(file: StoredFile, job: str = "job_1") -> Open:
    place = SegmentPlace(f"{DATA_DIR}/jobs/{job}/segments")
    return Open(job, "i", TableForm(), file.path, place, inputs=[f"{file.path}/text"], files=[file])


def deliver(channel: NodeChannel, *sent: msgspec.Struct) -> None:
    channel.receive(frames.join([messages.encode(each) for each in sent]))


async def test_messages_of_a_job_wait_for_its_files(files: NodeFiles, store: str, tmp_path: Path) -> None:
    """A job's rows come after its files, with the paths of the node; other jobs do not wait for them."""
    file = put(store, tmp_path, "jobs/job_1/dataset", "rows")
    channel = NodeChannel(files)
    grant, other = Grant(Lease("job_1", 0, 0, 1), 0, 0, 1), Revoke("job_2")
    deliver(channel, opened(file), grant, other)
    received = [messages.to_worker.decode(each) for each in await channel.read()]
    while len(received) < 3:
        received += [messages.to_worker.decode(each) for each in await channel.read()]
    assert received[0] == other and received[2] == grant
    opening = received[1]
    assert (Path(opening.dataset) / "text").read_text() == "rows" and opening.moved == {file.path: opening.dataset}
    assert Path(opening.segments.folder) == files.home / "segments" / "job_1"
    channel.send(Released("job_1"))
    assert not files.has("job_1", [file])


async def test_a_job_whose_files_cannot_be_brought(files: NodeFiles) -> None:
    """Its owner hears why and takes it back; what it sent meanwhile is dropped, and the job may be opened again."""
    channel = NodeChannel(files)
    deliver(channel, opened(StoredFile(f"{DATA_DIR}/jobs/job_1/dataset", "jobs/job_1/dataset/none/", 1)))
    deliver(channel, Grant(Lease("job_1", 0, 0, 1), 0, 0, 1))
    items = channel.items()
    failed = messages.to_owner.decode(frames.split(await anext(items))[0])
    assert isinstance(failed, Failed) and (failed.code, failed.job) == ("storage_failed", "job_1")
    deliver(channel, Revoke("job_1"))
    assert messages.to_owner.decode(frames.split(await anext(items))[0]) == Released("job_1")
    deliver(channel, Revoke("job_1"))
    assert [messages.to_worker.decode(each) for each in await channel.read()] == [Revoke("job_1")]


async def test_a_job_that_is_opened_again_while_it_is_opened(files: NodeFiles, store: str, tmp_path: Path) -> None:
    """Messages that waited are taken like others: a second `Open` gets the paths of the node, too."""
    file = put(store, tmp_path, "jobs/job_1/dataset", "rows")
    channel = NodeChannel(files)
    deliver(channel, opened(file), Revoke("job_1"), opened(file))
    received: list[Any] = []
    while len(received) < 3:
        received += [messages.to_worker.decode(each) for each in await channel.read()]
    assert received[1] == Revoke("job_1") and received[0] == received[2]
    assert not received[2].dataset.startswith(DATA_DIR)


async def test_the_class_of_a_job(
    files: NodeFiles, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code comes with the job, and its interpreter is that of an environment of the node."""
    rows, code = (
        put(store, tmp_path, "jobs/job_1/dataset", "rows"),
        put(store, tmp_path, "models/versions/a/main/1", "x"),
    )
    python = f"{DATA_DIR}/environments/abc/bin/python"
    schema = OutputSchema(
        "{}", validator="a.py:A", code="c", version=SchemaVersion("a@main/1", f"{code.path}/code", python)
    )
    asked: list[str] = []

    class Built:
        def __init__(self, folder: Path, isolation: object) -> None:
            asked.append(str(folder))

        async def python(self, interpreter: str | None, lock: str | None, log: Path) -> str:
            return f"/environments-here/{lock}"

    monkeypatch.setattr(node_files, "Environments", Built)
    monkeypatch.setattr(node_files.environments, "read_requested", lambda home: (None, (home / "text").read_text()))
    channel = NodeChannel(files)
    opening = msgspec.structs.replace(opened(rows), form=TableForm(schema=schema), files=[rows, code])
    deliver(channel, opening)
    (data,) = await channel.read()
    message = messages.to_worker.decode(data)
    assert isinstance(message, Open) and message.form.schema is not None
    version = message.form.schema.version
    assert version is not None and version.python == "/environments-here/x"
    assert not version.folder.startswith(DATA_DIR) and version.folder.endswith("/code")
    assert asked == [str(tmp_path / "cache" / Path(asked[0]).parent.name / "environments")]
    isolation = Isolation("bwrap", True, DATA_DIR)
    deliver(channel, Provide(Provision(isolation=isolation)))
    (data,) = await channel.read()
    provided = messages.to_worker.decode(data)
    assert isinstance(provided, Provide) and provided.provision.isolation is not None
    assert provided.provision.isolation.data_dir == str(tmp_path / "cache")


@pytest.mark.parametrize("path", [f"{DATA_DIR}/files/g", f"{DATA_DIR}/files/f/../../keys"])
async def test_a_path_that_is_not_in_the_store(files: NodeFiles, store: str, tmp_path: Path, path: str) -> None:
    """A job that names it is refused, and no other; so is a live request."""
    file = put(store, tmp_path, "files/f", "text")
    channel = NodeChannel(files)
    deliver(channel, msgspec.structs.replace(opened(file), dataset=path))
    items = channel.items()
    failed = messages.to_owner.decode(frames.split(await anext(items))[0])
    assert (
        isinstance(failed, Failed) and failed.job == "job_1" and f"{path} is not in the object store" in failed.message
    )
    deliver(channel, AnswerLive(1, LiveRequest("/v1/chat/completions", b"{}", adapter_place=path), [file]))
    answered = messages.to_owner.decode(frames.split(await anext(items))[0])
    assert isinstance(answered, Answered) and answered.raised is not None


async def test_adapters_of_live_requests(
    files: NodeFiles, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last that were named are held, so that a worker holds no more of them as time goes by."""
    monkeypatch.setattr(node_files, "LIVE_FILES_MAX", 2)
    adapters = [put(store, tmp_path, f"adapters/{name}", name) for name in "abc"]
    channel, request = NodeChannel(files), LiveRequest("/v1/chat/completions", b"{}")
    for number in (0, 1, 0, 2):
        place = msgspec.structs.replace(request, adapter_place=adapters[number].path)
        deliver(channel, AnswerLive(number, place, [adapters[number]]))
        (data,) = await channel.read()
        answer = messages.to_worker.decode(data)
        assert isinstance(answer, AnswerLive)
        assert (Path(answer.request.adapter_place) / "text").read_text() == "abc"[number]
    assert [files.has(LIVE, [each]) for each in adapters] == [True, False, True]


def test_what_a_killed_task_left(store: str, tmp_path: Path) -> None:
    """The next task removes it, and nothing of a task that runs or of one that makes its folder."""
    cache = cache_of(store, tmp_path)
    killed, fd = cache.enter_task()
    (killed / "part").write_text("rows")
    os.close(fd)  # as the kernel does
    running, _ = cache.enter_task()
    made = running.with_name(NEW + "begun")
    made.mkdir()
    (made / LOCK).touch()
    worker, worker_fd = cache.enter("w1")
    os.close(worker_fd)  # its owner has an hour to collect what it left
    cache.enter_task()
    assert not killed.exists() and running.exists() and made.exists() and worker.exists()


def test_what_a_dead_worker_left(files: NodeFiles, store: str, tmp_path: Path) -> None:
    """Bytes beyond those that the owner has, the row that ran alone and the end of the log come to it, and are gone."""
    folder = files.home / "segments" / "job_1"
    folder.mkdir(parents=True)
    (folder / "w1-0001.seg").write_bytes(b"head and blocks")
    (files.home / "w1.suspect").write_text("7")
    (files.home / "w1.log").write_text("its last words")
    left = collect(cache_folder(str(tmp_path / "cache"), store), "w1", {"job_1": {"w1-0001.seg": 5}})
    assert left == Left([LeftSegment("job_1", "w1-0001.seg", 5, b"and blocks")], b"7", b"its last words")
    assert not files.home.exists()
    start = Start("w1", ModelSpec("m", "function", "app.py:m"), str(tmp_path), provision=Provision())
    own = tmp_path / "segments"
    own.mkdir()
    (own / "w1-0001.seg").write_bytes(b"head ")
    assert keep_left(frames.encode(left), start, {"job_1": own})
    assert (own / "w1-0001.seg").read_bytes() == b"head and blocks"
    assert (tmp_path / "w1.suspect").read_text() == "7" and "last words" in (tmp_path / "w1.log").read_text()


@pytest.mark.parametrize(
    "segment",
    [
        LeftSegment("job_1", "../w1-0001.seg", 0, b"x"), LeftSegment("job_1", "w2-0001.seg", 0, b"x"),
        LeftSegment("job_2", "w1-0001.seg", 0, b"x"), LeftSegment("job_1", "w1-0001.seg", 3, b"x"),
    ],
)  # fmt: skip
def test_a_node_writes_nothing_else(segment: LeftSegment, tmp_path: Path) -> None:
    """A node that was taken over adds bytes only behind its worker's own segments of jobs that it had."""
    start = Start("w1", ModelSpec("m", "function", "app.py:m"), str(tmp_path))
    (tmp_path / "segments").mkdir()
    with pytest.raises(StorageFailed):
        keep_left(frames.encode(Left([segment])), start, {"job_1": tmp_path / "segments"})
    assert not list(tmp_path.glob("*.seg")) and not any(each.stat().st_size for each in tmp_path.glob("*/*"))


def test_credentials_of_a_node() -> None:
    """Nodes get settings; keys only where they may be sent; roles and files of the owner's machine never. A node's own
    credentials come first."""
    settings = {"AWS_REGION": "r", "AWS_ENDPOINT_URL": "http://s3"}
    keys = {"AWS_ACCESS_KEY_ID": "owner", "AWS_SESSION_TOKEN": "token", "AWS_PROFILE": "p", "AWS_ROLE_ARN": "arn"}
    storage = Storage("s3://b/p", {**settings, "AWS_ENDPOINT_URL_S3": "http://user:password@s3"}, keys)
    assert on_nodes(storage, with_credentials=False) == Storage("s3://b/p", settings)
    sent = on_nodes(storage, with_credentials=True)
    assert sent.credentials == {"AWS_ACCESS_KEY_ID": "owner", "AWS_SESSION_TOKEN": "token"}
    assert Provision(storage=sent).has_secrets and not Provision(storage=Storage("s3://b/p", settings)).has_secrets
    given = {**settings, **sent.credentials}
    own = {"AWS_ACCESS_KEY_ID": "node", "HOME": "/root"}
    assert joined(given, own) == {**settings, "AWS_ACCESS_KEY_ID": "node"}
    assert joined(given, {"AWS_REGION": "node"}) == given

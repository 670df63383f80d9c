"""Parts that nodes of a cluster write, with one node in this process: what of it counts, and what is written here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakes.one_node import OneNode
from fakes.s3_server import bucket_client, s3_environment, s3_server
from finished_job import FinishedJob, quiet, write_requests
from msgspec.structs import replace

from batchmill.errors import BatchmillError, StorageFailed
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import RunTask
from batchmill.executors.ray.shared_store import SharedStore
from batchmill.executors.ray.tasks import RayTasks
from batchmill.jobs.ledger.files import JobFiles
from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.parts import part_writers
from batchmill.jobs.results.parts.node_tries import FAILED_MAX, TRIES_MAX
from batchmill.jobs.results.parts.output_folders import Part, PartManifest, decode_manifest
from batchmill.jobs.results.parts.part_orders import PartOrder, PartsOrder, Written
from batchmill.jobs.results.parts.part_writers import (
    CHECK,
    CODE_CHARS_MAX,
    LEARN,
    PART,
    Nodes,
    can_use_nodes,
    checked,
)
from batchmill.jobs.results.parts.parts_run import PartsRun
from batchmill.jobs.results.results import CAUSES_MAX, GatherOrder, Learned
from batchmill.owner_term import ENDLESS, PrefixTerm, now_s
from batchmill.store.object_files import ObjectFiles
from batchmill.store.objects import StoreObjects
from batchmill.store.segments import objects as segment_objects
from batchmill.store.segments.format import SAMPLE_CHARS_MAX
from batchmill.store.sql.database import Database
from batchmill.store.sql.sqlite import SqliteBackend
from batchmill.types import RowError, SegmentPlace
from batchmill.types.connectors import Storage
from batchmill.wire.rows.forms import OpenAIForm, TableForm

JOB, BUCKET = "job_" + "a" * 20, "parts"
OUTPUT = f"s3://{BUCKET}/out/"
FAILED = {1, 6}
CONTENTS = ["a", "b", "a", "c", "b", "a", "d", "e", "c", "f", "g", "h"]
ROWS, PART_ROWS = len(CONTENTS), 3
WAIT_S = 20.0
encode = msgspec.json.encode


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as url, bucket_client(url, BUCKET) as client:
        for name, value in s3_environment(url).items():
            patch.setenv(name, value)
        yield client


class Stage:
    """A job whose input is an upload, with its files in an object store."""

    def __init__(
        self, folder: Path, client: Any, form: OpenAIForm | TableForm = OpenAIForm(), *, url: str = "",
        contents: Sequence[str] = CONTENTS, keys: bool = False, object_rows: int = 1,
    ) -> None:  # fmt: skip
        """Args: url: of the store with its files; empty: a folder. object_rows: whose lines are in one object."""
        self.client, self.data_dir, url = client, folder / "data", url or f"file://{folder}/store"
        self.files = JobFiles(self.data_dir, JOB)
        (self.data_dir / "files").mkdir(parents=True)
        self.source = self.data_dir / "files" / "in.jsonl"
        if isinstance(form, OpenAIForm):
            write_requests(self.source, contents)
        else:
            self.source.write_text("".join(f'{{"n":{n},"x{n % 2}":"{x}"}}\n' for n, x in enumerate(contents)))
        self.job = FinishedJob(self.files.home, self.source, form, keys=keys)
        self.leaders = self.job.leaders
        for first in range(0, len(self.leaders) - 2, object_rows):
            positions = range(first, min(first + object_rows, len(self.leaders) - 2))
            some = [[each for each in positions if (self.leaders[each] in FAILED) is bad] for bad in (False, True)]
            blocks = [self.job.block(each, bad) for each, bad in zip(some, (False, True), strict=True) if each]
            self.job.commit(*blocks)
        self.database = Database(SqliteBackend(folder / "batchmill.db"))
        self.stored = ObjectFiles(self.database, self.data_dir, StoreObjects(url), 2**30)
        self.node, self.here, self.term = OneNode(self.data_dir), [], ""
        self.node.tasks = RayTasks(
            self.node, SharedStore(self.stored, Storage(url), str(folder / "cache"), 2**30, self.data_dir)
        )
        self.objects_of_job = StoreObjects(url)

    def run_rest(self) -> None:
        """Run the last two rows."""
        self.job.commit(self.job.block([len(self.leaders) - 2, len(self.leaders) - 1]))
        self.settle()

    def settle(self) -> None:
        segment_objects.settle(self.objects_of_job, self.job.segments, JOB)

    async def open(self) -> None:
        await self.stored.open()
        await self.stored.publish(self.source, self.job.dataset, self.job.plan)

    async def close(self) -> None:
        await self.stored.close()
        self.database.close()

    async def offload(self, target: str, order: bytes, progress: Callable[[float], None], **_: Any) -> bytes:
        """As a child process would."""
        self.here.append(target)
        module, _, name = target.partition(":")
        return getattr(import_module(module), name)(order, progress)

    async def parts(
        self, kind: str = "jsonl", unrun: RowError | None = None, *, by_nodes: bool = True
    ) -> tuple[PartManifest, dict[str, bytes]]:
        """Gather the parts. They are in the output folder, with nothing else."""
        spec = SimpleNamespace(
            id=JOB, replaced_job=None, output_format=kind, part_rows=PART_ROWS, project="p", output=OUTPUT
        )
        assert can_use_nodes(spec, self.files)
        nodes = Nodes(self.node.tasks, self.stored) if by_nodes else None
        order = replace(self.job.order(Path("/"), unrun=unrun), output=OUTPUT)
        await PartsRun(spec, self.files, self.offload, self.term, nodes).run(order, quiet)
        found = self.objects()
        manifest = decode_manifest(found.pop("manifest.json"), OUTPUT)
        assert set(found) == manifest.names
        assert not list(self.objects_of_job.list(f"jobs/{JOB}/scratch/")), "what nodes were given stayed"
        return manifest, found

    async def gather(self, unrun: RowError | None = None) -> PartManifest:
        """Gather parts of lines, which have the right content."""
        manifest, found = await self.parts(unrun=unrun)
        one = self.data_dir / "one.jsonl"
        gather(self.job.order(one, unrun=unrun), quiet)
        assert b"".join(found[part.name] for part in manifest.parts) == one.read_bytes()
        errors = one.with_suffix(".errors.jsonl")
        expected = errors.read_bytes() if errors.exists() else b""
        assert b"".join(found[part.name] for part in manifest.errors) == expected
        return manifest

    def objects(self) -> dict[str, bytes]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix="out/").get("Contents", [])
        keys = [each["Key"] for each in listed]
        return {key.removeprefix("out/"): self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


@pytest.fixture
async def stage(tmp_path: Path, client: Any, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """Its form is the parameter, if there is one."""
    for name in [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]:
        client.delete_object(Bucket=BUCKET, Key=name)
    stage = Stage(tmp_path, client, getattr(request, "param", OpenAIForm()))
    await stage.open()
    yield stage
    await stage.close()


def rewritten(stage: Stage) -> int:
    """The parts that were written here."""
    return stage.here.count(PART)


async def test_a_node_writes_all_parts(stage: Stage) -> None:
    """What the owner checks is right, so that it writes none."""
    stage.run_rest()
    await stage.gather()
    assert len(stage.node.served) == ROWS // PART_ROWS and rewritten(stage) == 0 and stage.here.count(CHECK) == 1


async def test_rows_that_never_ran(stage: Stage) -> None:
    """Their lines are made of the input, which the server keeps: nodes read it from the store."""
    stage.settle()
    await stage.gather(RowError("cancelled", "the job was cancelled"))
    assert len(stage.node.served) == ROWS // PART_ROWS and rewritten(stage) == 0


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("stage", [TableForm()], indirect=True, ids=["table"])
async def test_tables(stage: Stage, kind: str) -> None:
    """They have the bytes that this machine would write: what all parts share is found out here."""
    stage.run_rest()
    manifest, _ = await stage.parts(kind)
    assert len(stage.node.served) == 2 * (ROWS // PART_ROWS) and rewritten(stage) == 0
    assert stage.here.count(LEARN) == 1  # of one part, to compare
    here, _ = await stage.parts(kind, by_nodes=False)
    assert rewritten(stage) == ROWS // PART_ROWS and here.has_same_content(manifest)


async def test_a_part_whose_node_is_lost(stage: Stage) -> None:
    """It is tried again under another name, so often; then it is written here. What lost tries wrote is removed."""
    stage.run_rest()
    stage.node.lost = TRIES_MAX - 1
    manifest = await stage.gather()
    assert rewritten(stage) == 0 and len({part.name[-14:] for part in manifest.parts}) == len(manifest.parts)
    stage.node.lost = TRIES_MAX
    await stage.gather()
    assert rewritten(stage) == 1


async def test_nodes_that_cannot_write(stage: Stage) -> None:
    """After a few parts no other is given to them: all are written here, and the job has its results."""
    stage.run_rest()
    stage.node.change = lambda _: frames.encode(frames.TaskReply(flaw="the store refuses the credentials"))
    await stage.gather()
    assert FAILED_MAX <= len(stage.node.served) < ROWS and rewritten(stage) == ROWS // PART_ROWS


async def test_nodes_past_the_term_of_the_prefix(stage: Stage) -> None:
    """Once the prefix of [storage] is another database's, neither a node nor this machine puts a part or a manifest,
    and the job pauses with the reason. Given back, all is gathered, and nothing of the first attempt stays.
    """
    stage.run_rest()
    term, send = PrefixTerm(ENDLESS, now_s() + 3600), stage.node.send

    def late(frame: RunTask) -> None:
        term.renew(0.0, "the prefix is another database's")
        send(frame)

    stage.term, stage.node.send = term.path, late  # type: ignore[method-assign]
    with pytest.raises(StorageFailed, match="the prefix is another database's"):
        await stage.gather()
    assert stage.node.served and stage.objects() == {}
    stage.node.send = send  # type: ignore[method-assign]
    term.renew(now_s() + 3600)
    await stage.gather()


def lying(change: Callable[[Written], Written], number: int | None = 0) -> Callable[[bytes], bytes]:
    """What a node says of one part, or of all, instead of the truth."""

    def changed(reply: bytes) -> bytes:
        answer = frames.task_replies.decode(reply).answer
        if "part" not in msgspec.json.decode(answer):
            return reply  # it says what the columns are
        written = msgspec.json.decode(answer, type=Written)
        if number is None or written.part.first == number * PART_ROWS:
            written = change(written)
        return frames.encode(frames.TaskReply(encode(written)))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda written: replace(written, part=replace(written.part, bytes=written.part.bytes - 1)),
        lambda written: replace(
            written, failed=0, causes={}, errors=None, part=replace(written.part, rows=PART_ROWS)
        ),
        lambda written: replace(written, part=replace(written.part, name="manifest.json")),
    ],
    ids=["size", "failed", "name"],
)  # fmt: skip
async def test_a_node_that_lies(stage: Stage, change: Callable[[Written], Written]) -> None:
    """A part that is not what the index and the store say is written again here."""
    stage.run_rest()
    stage.node.change = lying(change)
    await stage.gather()
    assert rewritten(stage) == 1


@pytest.mark.parametrize("stage", [TableForm()], indirect=True, ids=["table"])
@pytest.mark.parametrize(
    "change",
    [
        lambda learned: replace(learned, names=[*learned.names, "y"], kinds={**learned.kinds, "y": ["text"]}),
        lambda learned: replace(learned, names=learned.names[:1]),
        lambda learned: replace(learned, kinds={"n": ["animal"]}),
    ],
    ids=["more", "fewer", "kind"],
)
async def test_a_node_that_lies_about_columns(stage: Stage, change: Callable[[Learned], Learned]) -> None:
    """What it says of one part is compared: then no node is believed, and the parts have the bytes that they have
    here."""

    def changed(reply: bytes) -> bytes:
        answer = frames.task_replies.decode(reply).answer
        learned = msgspec.json.decode(answer, type=Learned)
        return frames.encode(frames.TaskReply(encode(change(learned))))

    stage.run_rest()
    stage.node.change = changed
    manifest, _ = await stage.parts("parquet")
    assert rewritten(stage) == ROWS // PART_ROWS and stage.here.count(LEARN) >= ROWS // PART_ROWS
    here, _ = await stage.parts("parquet", by_nodes=False)
    assert here.has_same_content(manifest)


@pytest.mark.parametrize("stage", [TableForm()], indirect=True, ids=["table"])
@pytest.mark.parametrize(
    "change",
    [
        lambda written: replace(written, part=replace(written.part, bytes=written.part.bytes - 1)),
        lambda written: replace(written, failed=0, causes={}),
    ],
    ids=["size", "failed"],
)
async def test_a_node_that_lies_about_a_table(stage: Stage, change: Callable[[Written], Written]) -> None:
    """Its size is compared with the store, and its failed rows with the index: there are no lines to add up."""
    stage.run_rest()
    stage.node.change = lying(change)
    await stage.parts("csv")
    assert rewritten(stage) == 1


async def test_a_part_that_was_changed_in_the_store(stage: Stage) -> None:
    """Files of another length than the lines of their rows are written again here, though all sizes agree."""

    def shortened(written: Written) -> Written:
        key = f"out/{written.part.name}"
        stage.client.put_object(Bucket=BUCKET, Key=key, Body=b"{}\n" * written.part.rows)
        return replace(written, part=replace(written.part, bytes=3 * written.part.rows))

    stage.run_rest()
    stage.node.change = lying(shortened, number=1)
    await stage.gather()
    assert rewritten(stage) == 1


def test_what_cannot_describe_a_part() -> None:
    """A reply that is no JSON, of other rows, or that does not add up is refused before anything is looked up."""
    gathering = GatherOrder("d", ["p"], SegmentPlace("s"), [], OpenAIForm(), OUTPUT)
    order = PartOrder(PartsOrder(gathering, JOB, 0, "0" * 8, "scratch", None, ""), 1, 3, 6)
    name = f"part-00001-{'a' * 20}-{'0' * 8}.jsonl"
    part = Part(name, 3, 6, 2, 10, "f" * 64)
    errors = replace(part, name=name.replace("part", "errors"), rows=1)
    right = Written(part, errors, 1, {"code": (1, "sample")})
    assert checked(encode(right), order) == right
    wrong: list[bytes] = [b"", b"\xff", b"{}", encode({"part": None}), encode(replace(right, errors=None))]
    wrong += [encode(replace(right, failed=number)) for number in (-1, 0, 4)]
    wrong += [encode(replace(right, causes=causes)) for causes in ({}, {"a": (2, "")}, {"a": (2, ""), "b": (-1, "")})]
    wrong.append(encode(replace(right, causes={"c" * (CODE_CHARS_MAX + 1): (1, "")})))
    for change in ({"name": "x"}, {"first": 0}, {"end": 7}, {"rows": 3}, {"bytes": -1}, {"sha256": "f" * 63 + "g"}):
        wrong.append(encode(replace(right, part=replace(part, **change))))
        wrong.append(encode(replace(right, errors=replace(errors, **change))))
    for answer in wrong:
        with pytest.raises(BatchmillError, match="a node sent what"):
            checked(answer, order)
    long = replace(right, causes={"code": (1, "x" * 2**20)})
    assert checked(encode(long), order).causes == {"code": (1, "x" * SAMPLE_CHARS_MAX)}


def test_a_node_names_so_many_error_codes() -> None:
    """They are kept in memory and stored: a node that was taken over fills neither."""
    gathering = GatherOrder("d", ["p"], SegmentPlace("s"), [], OpenAIForm(), OUTPUT)
    parts = PartsOrder(gathering, JOB, 0, "0" * 8, "scratch", None, "", kind="csv")
    for codes in (CAUSES_MAX + 1, CAUSES_MAX + 2):
        part = Part(f"part-00000-{'a' * 20}-{'0' * 8}.csv", 0, codes, codes, 10, "f" * 64)
        answer = encode(Written(part, None, codes, {f"code{number}": (1, "") for number in range(codes)}))
        with nullcontext() if codes == CAUSES_MAX + 1 else pytest.raises(BatchmillError, match="a node sent what"):
            checked(answer, PartOrder(parts, 0, 0, codes))


async def test_an_attempt_that_fails(stage: Stage) -> None:
    """What it had put into the store for the nodes goes with it, and the failure is the part's own."""

    async def write(target: str, order: bytes, progress: Callable[[float], None], **_: Any) -> bytes:
        if target == PART:
            raise StorageFailed("no room for parts")
        return await offload(target, order, progress)

    stage.run_rest()
    stage.node.change = lambda _: frames.encode(frames.TaskReply(flaw="the store refuses the credentials"))
    offload, stage.offload = stage.offload, write
    with pytest.raises(StorageFailed, match="no room for parts"):
        await stage.parts()
    assert not list(stage.objects_of_job.list(f"jobs/{JOB}/scratch/"))


async def test_parts_are_written_again_side_by_side(stage: Stage) -> None:
    """A cluster that lies about all parts of a large job does not make its owner write them one after the other."""
    begun = asyncio.Event()
    running = 0

    async def write(target: str, order: bytes, progress: Callable[[float], None], **_: Any) -> bytes:
        nonlocal running
        if target == PART:
            running += 1
            if running == 2:
                begun.set()
            async with asyncio.timeout(WAIT_S):
                await begun.wait()
        return await offload(target, order, progress)

    stage.run_rest()
    stage.node.change = lying(lambda written: replace(written, part=replace(written.part, bytes=0)), number=None)
    offload, stage.offload = stage.offload, write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writers.os, "sched_getaffinity", lambda _: {0, 1})
        await stage.gather()
    assert rewritten(stage) == ROWS // PART_ROWS


def test_what_nodes_cannot_read_or_write(tmp_path: Path) -> None:
    """An input that only this machine has, or results in a folder of it, keep the parts here."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"n": 1}) + "\n")
    inside = JobFiles(tmp_path, JOB)
    outside = JobFiles(tmp_path / "data", JOB)
    for files, output, can in ((inside, OUTPUT, True), (inside, "/out/", False), (outside, OUTPUT, False)):
        if not files.dataset.exists():
            FinishedJob(files.home, write_requests(source, CONTENTS), OpenAIForm())
        assert can_use_nodes(SimpleNamespace(output=output), files) is can

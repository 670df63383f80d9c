"""Rows that nodes of a cluster check, with one node in this process: what is sealed is what this machine would seal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.one_node import OneNode
from fakes.s3_server import bucket_client, s3_environment, s3_server
from msgspec.structs import replace

from batchmill.datasets import layout
from batchmill.datasets.checking import inspection, spans
from batchmill.datasets.checking.spans import FAULTY_MAX, CheckedSpan, Piece, Result
from batchmill.datasets.orders import RefusedRow, ValidatedChunk
from batchmill.datasets.request_digests import DIGEST_BYTES
from batchmill.errors import InputChanged, InvalidDataset, Unavailable
from batchmill.executors.ray import frames
from batchmill.executors.ray.shared_store import SharedStore
from batchmill.executors.ray.tasks import RayTasks
from batchmill.jobs.intake import node_sealing
from batchmill.jobs.intake.node_sealing import NodeSealing
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder
from batchmill.jobs.intake.preview import seal_and_plan
from batchmill.jobs.results.parts.node_tries import FAILED_MAX, TRIES_MAX
from batchmill.jobs.results.parts.part_writers import Nodes
from batchmill.owner_term import ENDLESS, PrefixTerm
from batchmill.store.object_files import ObjectFiles
from batchmill.store.objects import StoreObjects
from batchmill.store.sql.database import Database
from batchmill.store.sql.sqlite import SqliteBackend
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.types.connectors import Storage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import OpenAIForm

JOB, BUCKET = "job_" + "b" * 20, "sealing"
ROWS, RANGE, SPAN, LINE_MAX = 500, 4000, 16_000, 9000
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def line(number: int) -> bytes:
    """Rows of two adapters with repeated prompts; some are refused, repeat an id, are blank or longer than a range."""
    if number % 101 == 5:
        return b"not JSON\n" if number % 2 else b"  \r\n"
    body = {"model": f"a{number % 2}", "prompt": f"p{number % 7} " * (number % 40), "max_tokens": 5, "temperature": 0}
    if number == 233:
        body["prompt"] = "long" * 2000
    if number in (400, 401):
        body["prompt"] = "too long" * 2000
    custom_id = f"row-{17 if number == 450 else number}"
    row = {"custom_id": custom_id, "url": "/v1/completions", "body": body}
    return json.dumps(row).encode() + (b"\r\n" if number % 3 else b"\n")


TEXT = b"".join(map(line, range(ROWS)))
OBJECTS = {"a.jsonl": TEXT[: TEXT.index(b"\n", len(TEXT) // 3) + 1], "bom.jsonl": layout.BOM}
OBJECTS["c.jsonl"] = layout.BOM + TEXT[len(OBJECTS["a.jsonl"]) :].rstrip()


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as url, bucket_client(url, BUCKET) as client:
        for name, value in s3_environment(url).items():
            patch.setenv(name, value)
        yield client


class Stage:
    def __init__(self, folder: Path, client: Any) -> None:
        self.client, self.data_dir, self.store = client, folder / "data", folder / "store"
        self.data_dir.mkdir()
        self.database = Database(SqliteBackend(folder / "batchmill.db"))
        self.stored = self.files()
        self.node = OneNode(self.data_dir)
        store = SharedStore(self.stored, Storage(f"file://{self.store}"), str(folder / "cache"), 2**20, self.data_dir)
        self.node.tasks = RayTasks(self.node, store)
        adapters = {f"a{number}": f"/adapters/{number}" for number in range(2)}
        self.spec = JobSpec(
            id=JOB, dataset=DatasetSpec([f"s3://{BUCKET}/{key}" for key in OBJECTS], line_bytes_max=LINE_MAX),
            models=[ModelSpec("m", "llm", "base", adapters=adapters)], form=OpenAIForm(),
            policy=Policy(on_invalid="skip"), output=None, identity="", code={}, created=0.0, project="p",
        )  # fmt: skip

    def files(self) -> ObjectFiles:
        return ObjectFiles(self.database, self.data_dir, StoreObjects(f"file://{self.store}"), 2**20)

    def upload(self) -> None:
        for key, data in OBJECTS.items():
            self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    term = ""

    async def offload(self, target: str, order: bytes, progress: Callable[[float], None], **_: Any) -> bytes:
        """As a child process would."""
        module, _, name = target.partition(":")
        return getattr(import_module(module), name)(order, progress)

    async def seal(self, *, by_nodes: bool = True) -> tuple[Prepared, dict[str, bytes]]:
        """Seal and plan. Returns also the files of both, by name."""
        home = self.data_dir / "jobs" / JOB
        folders = home / "dataset", home / "plan-0"
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        order = PrepareOrder(self.spec, *map(str, folders))
        nodes = NodeSealing(Nodes(self.node.tasks, self.stored), self.term) if by_nodes else None
        shares: list[float] = []
        try:
            prepared = await seal_and_plan(order, None, self.offload, shares.append, nodes)
        finally:
            assert not self.left(), "objects of the nodes stay"
        assert shares[-1] == max(shares) == 1.0
        return prepared, {path.name: path.read_bytes() for folder in folders for path in folder.iterdir()}

    async def seal_as_here(self) -> Prepared:
        """Seal, and compare every byte and the report with what this machine does alone."""
        prepared, found = await self.seal()
        alone, expected = await self.seal(by_nodes=False)
        assert found == expected
        assert replace(prepared, flaws=[]) == alone
        return prepared

    def left(self) -> list[Path]:
        return [path for path in self.store.rglob("*/scratch/**/*") if path.is_file()]


@pytest.fixture
async def stage(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(inspection, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(spans, "SPAN_BYTES", SPAN)
    monkeypatch.setattr(spans, "PIECE_BYTES", 1000)
    monkeypatch.setattr(node_sealing, "BYTES_MIN", 1000)
    stage = Stage(tmp_path, client)
    stage.upload()
    await stage.stored.open()
    yield stage
    await stage.stored.close()
    stage.database.close()


async def test_nodes_past_the_term_of_the_prefix(stage: Stage) -> None:
    """They put nothing, and this machine checks the rows."""
    term, puts = PrefixTerm(ENDLESS, 0.0), []
    term.renew(0.0, "the prefix is another database's")
    stage.term = term.path
    stage.node.change = lambda reply: puts.extend(stage.left()) or reply
    await stage.seal_as_here()
    assert len(stage.node.served) >= FAILED_MAX and puts == []


def span_count(stage: Stage) -> int:
    sizes = {path: len(OBJECTS[path.rpartition("/")[2]]) for path in stage.spec.dataset.paths}
    parts = [spans.SourcePart(at, path, path, 0, 0, size) for at, (path, size) in enumerate(sizes.items())]
    return len(list(spans.spans(parts)))


async def test_nodes_check_all_rows(stage: Stage) -> None:
    """Dataset, plan and report are those of this machine, bit for bit: refused rows, repeated ids, long lines."""
    prepared = await stage.seal_as_here()
    assert prepared.flaws == [] and len(stage.node.served) == span_count(stage) > 5
    assert prepared.plan is not None and prepared.plan.followers and prepared.plan.permuted
    codes = {problem.code for problem in prepared.report.problems}
    assert codes == {"invalid_json", "duplicate_custom_id", "line_too_long"}


async def test_digests_of_requests_for_reuse(stage: Stage) -> None:
    """Nodes find the digests by which results of earlier rows are taken over: equal for equal requests alone."""
    assert (await stage.seal_as_here()).flaws == []
    prepared, files = await stage.seal()
    found = files[layout.REQUESTS]
    digests = [found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)]
    assert prepared.plan is not None and len(digests) == prepared.plan.rows
    assert len(set(digests)) < len(digests) and all(len(digest) == DIGEST_BYTES for digest in digests)
    answered = prepared.plan.leaders
    assert answered <= len(set(digests)) <= answered + 1  # refused rows have none: they share one that is empty


async def test_a_node_that_is_lost(stage: Stage) -> None:
    """Its span is checked by another try, whose objects have other names; after a few tries it is checked here."""
    stage.node.lost = TRIES_MAX - 1
    assert (await stage.seal_as_here()).flaws == []
    assert len(stage.node.served) == span_count(stage) + TRIES_MAX - 1
    stage.node.lost = TRIES_MAX * span_count(stage)
    stage.node.served.clear()
    assert (await stage.seal_as_here()).flaws == []
    assert FAILED_MAX <= len(stage.node.served) <= TRIES_MAX * span_count(stage)


async def test_without_a_cluster(stage: Stage) -> None:
    """A job waits for no cluster that is away, or whose nodes cannot check: this machine does."""

    async def away() -> None:
        raise Unavailable("the cluster is away", code="cluster_unavailable")

    stage.node.change = lambda _: frames.encode(frames.TaskReply(flaw="no credentials"))
    await stage.seal_as_here()
    stage.node.served.clear()
    stage.node.reach = away
    await stage.seal_as_here()
    assert not stage.node.served


async def test_what_nodes_do_not_check(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of this machine, a copy, and a dataset that is short."""
    stage.spec = replace(stage.spec, dataset=replace(stage.spec.dataset, copy=True))
    await stage.seal()
    stage.spec = replace(stage.spec, dataset=replace(stage.spec.dataset, copy=False))
    monkeypatch.setattr(node_sealing, "BYTES_MIN", len(TEXT) + 100)
    await stage.seal_as_here()
    monkeypatch.setattr(node_sealing, "BYTES_MIN", 0)
    (tmp_path / "in.jsonl").write_bytes(TEXT)
    paths = [str(tmp_path / "in.jsonl"), *stage.spec.dataset.paths]
    stage.spec = replace(stage.spec, dataset=replace(stage.spec.dataset, paths=paths))
    await stage.seal_as_here()
    assert not stage.node.served


@pytest.mark.parametrize("moment", ["first", "last"])
async def test_an_object_that_changes_meanwhile(stage: Stage, moment: str) -> None:
    """The job pauses, as it does where this machine checks the rows."""
    turn = 1 if moment == "first" else span_count(stage)

    def change(reply: bytes) -> bytes:
        if len(stage.node.served) == turn:
            stage.client.put_object(Bucket=BUCKET, Key="c.jsonl", Body=OBJECTS["c.jsonl"] + b"\n")
        return reply

    stage.node.change = change
    with pytest.raises(InputChanged, match="c.jsonl changed while it was read"):
        await stage.seal()


async def test_too_many_rows(stage: Stage) -> None:
    """Nodes check no more of them than it takes to know; the error is this machine's."""
    stage.spec = replace(stage.spec, rows_max=100)
    with pytest.raises(InvalidDataset, match="more than 100 rows"):
        await stage.seal()
    assert len(stage.node.served) < span_count(stage)


# -- nodes that do not do what they should ----------------------------------------------------------------------------

Change = Callable[[list[Result]], list[Result]]


def lying(stage: Stage, change: Change, spans_wrong: range) -> Callable[[bytes], bytes]:
    """Changes what a node found in some spans, in the objects and in what it says of them."""

    def changed(reply: bytes) -> bytes:
        if len(stage.node.served) - 1 not in spans_wrong:
            return reply
        span = decode(frames.task_replies.decode(reply).answer, type=CheckedSpan)
        pieces = []
        for number, piece in enumerate(span.pieces):
            path = stage.store / spans.name_of(span.prefix, number)
            data = encode(change(decode(path.read_bytes(), type=list[Result])))
            path.write_bytes(data)
            pieces.append(Piece(piece.ranges, len(data), spans.blake3(data).hexdigest()))
        return frames.encode(frames.TaskReply(encode(replace(span, pieces=pieces))))

    return changed


def of_chunks(change: Callable[[list[ValidatedChunk]], list[ValidatedChunk]]) -> Change:
    return lambda results: [(change(chunks) if chunks else chunks, end) for chunks, end in results]


def first(**fields: Any) -> Change:
    """The first chunk of each range with other fields. A function makes a field of the chunk."""

    def change(chunks: list[ValidatedChunk]) -> list[ValidatedChunk]:
        made = {name: value(chunks[0]) if callable(value) else value for name, value in fields.items()}
        return [replace(chunks[0], **made), *chunks[1:]]

    return of_chunks(change)


def at_end(**fields: Any) -> Change:
    return lambda results: [(chunks, replace(end, **fields)) for chunks, end in results]


U16, U64 = (65_000).to_bytes(2, "little"), (2**64 - 1).to_bytes(8, "little")
WRONG: dict[str, Change] = {
    "gap": of_chunks(lambda chunks: chunks[1:]),
    "twice": of_chunks(lambda chunks: [chunks[0], *chunks]),
    "other range": lambda results: [results[-1], *results[1:-1], results[0]],
    "nothing": lambda results: [([], end) for _, end in results],
    "fewer ranges": lambda results: results[1:],
    "start": first(start=lambda chunk: chunk.start + 1),
    "end": first(end=lambda chunk: chunk.end - 1),
    "rows": first(rows=lambda chunk: chunk.rows + 1),
    "lines": first(lines=0),
    "blocks": first(block_rows=0),
    "checksums": first(checksums=b""),
    "ids": first(ids=b""),
    "requests": first(requests=b"digest"),
    "offsets": first(offsets=lambda chunk: chunk.offsets[-8:] * chunk.rows if chunk.rows > 1 else U64 * chunk.rows),
    "far offsets": first(offsets=lambda chunk: chunk.offsets[:-8] + U64),
    "target": first(keys=lambda chunk: (chunk.keys[0][:-2] + U16, *chunk.keys[1:])),
    "prefix": first(keys=lambda chunk: (chunk.keys[0], chunk.keys[1][:-8] + U64, *chunk.keys[2:])),
    "no keys": first(keys=(b"", b"", b"", b"")),
    "refused row": first(refused=lambda chunk: [RefusedRow(chunk.rows, 0, "c", "m")]),
    "refused line": first(refused=lambda chunk: [RefusedRow(0, chunk.lines, "c", "m")]),
    "refused twice": first(refused=[RefusedRow(0, 0, "c", "m")] * 2),
    "long message": first(refused=[RefusedRow(0, 0, "c", "m" * 2**20)]),
    "digest": at_end(digest=b"short"),
    "names": at_end(names=["a column"]),
    "adapters": at_end(adapters=["owner/adapter"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_what_cannot_be_right(stage: Stage, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such ranges are checked here: what is sealed is right, and the owner learns of it."""
    monkeypatch.setattr(spans.SpanReader, "_compare", lambda *_: None)  # which would find some of them, too
    stage.node.change = lying(stage, WRONG[case], range(1, 2))
    prepared = await stage.seal_as_here()
    assert 1 <= len(prepared.flaws) <= FAULTY_MAX, prepared.flaws


async def test_nodes_that_find_nothing_right(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few ranges all others are checked here, and by several processes again."""
    monkeypatch.setattr(spans.SpanReader, "_compare", lambda *_: None)
    stage.node.change = lying(stage, WRONG["gap"], range(1000))
    prepared = await stage.seal_as_here()
    assert len(prepared.flaws) == FAULTY_MAX


async def test_what_is_wrong_and_could_be_right(stage: Stage) -> None:
    """One range is checked here, too. Where it differs, this machine checks all rows: their versions may differ."""
    stage.node.change = lying(stage, at_end(digest=bytes(32)), range(1000))
    prepared = await stage.seal_as_here()
    assert len(prepared.flaws) == 1 and "found something else" in prepared.flaws[0]


async def test_objects_that_are_gone_or_damaged(stage: Stage) -> None:
    """What they held is checked here."""

    def damaged(reply: bytes) -> bytes:
        span = decode(frames.task_replies.decode(reply).answer, type=CheckedSpan)
        path = stage.store / spans.name_of(span.prefix, 0)
        match len(stage.node.served):
            case 2:
                path.unlink()
            case 3:
                path.write_bytes(path.read_bytes()[:-1] + b"x")
        return reply

    stage.node.change = damaged
    assert len((await stage.seal_as_here()).flaws) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\xff", encode(None), encode(CheckedSpan("", [], 0)),
        lambda span: replace(span, rows=-1),
        lambda span: replace(span, prefix="jobs/other/"),
        lambda span: replace(span, pieces=span.pieces[1:]),
        lambda span: replace(span, pieces=[replace(span.pieces[0], ranges=-1), *span.pieces]),
        lambda span: replace(span, pieces=[replace(each, bytes=2**40) for each in span.pieces]),
        lambda span: replace(span, pieces=[replace(each, digest="x" * 64) for each in span.pieces]),
    ],
)  # fmt: skip
async def test_what_cannot_describe_a_span(stage: Stage, answer: Any) -> None:
    """It is refused before any object is read."""

    def changed(reply: bytes) -> bytes:
        span = decode(frames.task_replies.decode(reply).answer, type=CheckedSpan)
        return frames.encode(frames.TaskReply(answer if isinstance(answer, bytes) else encode(answer(span))))

    stage.node.change = changed
    assert (await stage.seal_as_here()).flaws == []
    assert len(stage.node.served) >= FAILED_MAX


async def test_what_a_killed_owner_left(stage: Stage) -> None:
    """Its successor removes the objects of nodes; those that a node puts even later go with the job."""
    objects, job = StoreObjects(f"file://{stage.store}"), stage.data_dir / "jobs" / JOB
    killed = stage.stored.scratch(job)
    prefix = await killed.__aenter__()
    objects.put(f"{prefix}000000-abc/0000", b"found")
    successor = stage.files()
    await successor.open()
    assert successor._deleting is not None
    await successor._deleting
    assert not stage.left()
    objects.put(f"{prefix}000001-abc/0000", b"found late")
    await successor.remove(job)
    assert not stage.left()
    await successor.close()

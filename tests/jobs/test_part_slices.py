"""What nodes read for a part of results: the slice of the index for its rows, and the objects with their lines."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import s3_environment
from msgspec.structs import replace
from test_parts_by_nodes import BUCKET, JOB, PART_ROWS, Stage, client, rewritten

from batchmill.errors import InputChanged, StorageFailed
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import RunTask
from batchmill.jobs.ledger.plan import iter_rejected
from batchmill.jobs.results.parts import index_slices
from batchmill.jobs.results.parts.part_orders import PartOrder
from batchmill.object_store.urls import ObjectInfo
from batchmill.store.segments import objects as segment_objects
from batchmill.store.segments.objects import ObjectSource, folder_of, object_name
from batchmill.types import RowError, SegmentObject

__all__ = ["client"]  # the S3 server
STORE = f"s3://{BUCKET}/own"
UNRUN = RowError("cancelled", "the job was cancelled")


@asynccontextmanager
async def opened(stage: Stage) -> AsyncIterator[Stage]:
    await stage.open()
    try:
        yield stage
    finally:
        await stage.close()


@pytest.fixture
def counted(client: Any) -> Iterator[FaultyObjects]:
    """Counts the requests of this process and its node."""
    with faulty_objects(os.environ["AWS_ENDPOINT_URL"]) as plan, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(plan.url).items():
            patch.setenv(name, value)
        yield plan
    while found := client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": each["Key"]} for each in found]})


class CountingNode:
    """Notes what the node of a stage asks of the store for each task."""

    def __init__(self, stage: Stage, plan: FaultyObjects) -> None:
        self._plan, self._send = plan, stage.node.send
        self.requests: list[list[tuple[str, str]]] = []  # method and path
        self.read_bytes: list[int] = []
        stage.node.send = self.send  # type: ignore[method-assign]

    def send(self, frame: RunTask) -> None:
        before, read_bytes = len(self._plan.requests), self._plan.read_bytes
        self._send(frame)
        self.requests.append([(method, path) for method, path, _ in self._plan.requests[before:]])
        self.read_bytes.append(self._plan.read_bytes - read_bytes)


async def gathered(folder: Path, client: Any, plan: FaultyObjects, rows: int) -> CountingNode:
    """What the parts of a job cost the node, each of whose rows lies in an object of its own."""
    folder.mkdir()
    async with opened(Stage(folder, client, url=f"{STORE}-{rows}", contents=["text"] * rows)) as stage:
        stage.run_rest()
        node = CountingNode(stage, plan)
        await stage.gather()
        assert rewritten(stage) == 0 and len(node.requests) == rows // PART_ROWS
    for key in stage.objects():
        client.delete_object(Bucket=BUCKET, Key=f"out/{key}")
    return node


async def test_what_a_part_costs(tmp_path: Path, client: Any, counted: FaultyObjects) -> None:
    """A node lists nothing, and asks for a slice and the objects of the rows, once each: however long the job is."""
    short = await gathered(tmp_path / "short", client, counted, 4 * PART_ROWS)
    long = await gathered(tmp_path / "long", client, counted, 12 * PART_ROWS)
    for node in (short, long):
        for requests in node.requests[:-1]:  # the last part has two rows in one object
            reads = [path for method, path in requests if method == "GET"]
            assert len(reads) == len(set(reads)) == 1 + PART_ROWS
            assert sum("/scratch/" in path for path in reads) == 1
            assert {method for method, _ in requests} == {"GET", "PUT"} and not any(
                "list-type" in path for path in reads
            )
    assert max(long.read_bytes) < 1.1 * max(short.read_bytes)


@pytest.mark.parametrize("bound", ["INPUT_ROWS", "INPUT_BYTES", ""])
@pytest.mark.parametrize("piece_rows", [1, 2, index_slices.PIECE_ROWS])
async def test_rows_without_lines(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch, piece_rows: int, bound: str, counted: FaultyObjects
) -> None:
    """Rows that follow others and rows that never ran are made of the input, which their slices have, of any length.
    The dataset is brought for a part that needs more rows of it than a slice may have, and for no other.
    """
    monkeypatch.setattr(index_slices, "PIECE_ROWS", piece_rows)
    if bound:
        monkeypatch.setattr(index_slices, bound, 1)
    contents = [*"abcdef", *"abc", *"ghi"]  # 12 rows, of which 3 follow others
    async with opened(Stage(tmp_path, client, url=STORE, contents=contents, keys=True)) as stage:
        assert len(stage.leaders) == 9
        stage.settle()
        await stage.gather(UNRUN)
        assert rewritten(stage) == 0
        needs = [order_of(frame).slice.needs_input for frame in stage.node.served]
        assert needs == ([False, False, True, True] if bound else [False] * 4)
        assert [bool(task_of(frame).files) for frame in stage.node.served] == needs


def task_of(frame: RunTask) -> frames.TaskOrder:
    return frames.task_orders.decode(frame.order)


def order_of(frame: RunTask) -> Any:
    return msgspec.json.decode(task_of(frame).order, type=PartOrder)


async def test_refused_rows(tmp_path: Path, client: Any, counted: FaultyObjects) -> None:
    """One bad row of a job keeps nodes from nothing: its line is made of the input, as here."""
    stage = Stage(tmp_path, client, url=STORE, contents=['"}]', *"abcdefghijk"])
    assert len(stage.leaders) == 11
    async with opened(stage):
        stage.run_rest()
        await stage.gather()
        assert rewritten(stage) == 0 and len(stage.node.served) == 4
        assert not any(task_of(frame).files for frame in stage.node.served)


async def test_a_retried_job(tmp_path: Path, client: Any, counted: FaultyObjects) -> None:
    """Rows that ran again have their lines in other segments, and outcomes that commits carried in the database."""
    async with opened(Stage(tmp_path, client, url=STORE)) as stage:
        stage.run_rest()
        stage.job.again([1, 6])
        ref = stage.job.commit(stage.job.block([0, 1], text="again"))
        path = stage.job.segments / ref.segment
        stage.job.committed[-1] = 1, replace(ref, segment="w.carried")
        order = stage.job.order
        blocks = {"w.carried": [(ref.offset, path.read_bytes()[ref.offset :])]}
        path.unlink()

        def carried(output: Path, *, unrun: RowError | None = None) -> Any:
            gather = order(output, unrun=unrun)
            return replace(gather, segments=replace(gather.segments, blocks=blocks))

        stage.job.order = carried  # type: ignore[method-assign]
        manifest = await stage.gather()
        assert rewritten(stage) == 0 and manifest.failed == 0


async def test_rows_that_lie_apart(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch, counted: FaultyObjects
) -> None:
    """A part whose rows are scattered over many more bytes is written here, where the segments are files."""
    monkeypatch.setattr(index_slices, "SCATTERED_BYTES", 0)
    monkeypatch.setattr(index_slices, "SCATTERED_RATIO", 1)
    async with opened(Stage(tmp_path, client, url=STORE)) as stage:
        stage.job.again(range(12))
        stage.job.commit(stage.job.block([0, 11, 1, 2, 3, 4, 5, 6, 7, 8, 10, 9], text="again"))
        stage.settle()
        await stage.gather()
        assert rewritten(stage) == 2  # of rows 0 to 2, and of rows 9 to 11
        monkeypatch.setattr(index_slices, "SCATTERED_MAX", 1)
        await stage.gather()
        assert rewritten(stage) == 2 + 4  # after the first, no other is looked at


async def test_a_slice_that_was_changed(tmp_path: Path, client: Any, counted: FaultyObjects) -> None:
    """A node that finds other bytes writes nothing from them: the part is written here."""
    async with opened(Stage(tmp_path, client, url=STORE)) as stage:
        stage.run_rest()
        send = stage.node.send

        def change(frame: RunTask) -> None:
            (piece,) = order_of(frame).slice.pieces
            client.put_object(Bucket=BUCKET, Key=f"own/{piece.name}", Body=bytes(piece.bytes))
            send(frame)

        stage.node.send = change  # type: ignore[method-assign]
        await stage.gather()
        assert rewritten(stage) == 4


class Recorded:
    """Objects of a segment whose byte n is n, of which reads are noted."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int, int]] = []

    def get_range(self, info: ObjectInfo, start: int, end: int) -> memoryview:
        if info.etag != "seen":
            raise InputChanged("it is another one")
        self.reads.append((info.key, start, end))
        first = int(info.key.rpartition("/")[2].partition("-")[0])
        return memoryview(bytes(n % 256 for n in range(first + start, first + end)))

    def infos(self, prefix: str) -> list[ObjectInfo]:
        return []


def test_a_segment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning to its end no byte is asked for twice, and none that nobody needs; reads are as long as one
    request may be. Several segments may be read in turn.
    """
    monkeypatch.setattr(segment_objects, "READ_BYTES", 16)
    objects = Recorded()
    known = [SegmentObject(0, 40, 40, "seen"), SegmentObject(40, 50, 47, "seen")]
    source = ObjectSource(objects, JOB, {"w1-0001.seg": known, "w2-0001.seg": known})
    for start, end in pairwise([3, 5, 6, 20, 39, 44, 47]):
        for name in ("w1-0001.seg", "w2-0001.seg"):
            assert source.read(name, start, end - start) == bytes(range(start, end))
    key = object_name(folder_of(JOB), "w1-0001.seg", 0, 40)
    second = object_name(folder_of(JOB), "w1-0001.seg", 40, 10)
    mine = [each for each in objects.reads if "/w1-" in each[0]]
    assert mine == [(key, 3, 19), (key, 19, 35), (key, 35, 40), (second, 0, 7)]
    assert len(objects.reads) == 2 * len(mine)
    assert source.read("w1-0001.seg", 48, 10) == bytes([48, 49]) and source.size("w1-0001.seg") == 50
    monkeypatch.setattr(segment_objects, "KEPT_BYTES", 1)
    source.read("w2-0001.seg", 0, 1)
    assert len(source._kept) == 1


def test_objects_that_are_not_as_they_were_seen() -> None:
    """Another object of the same name is refused; one that nobody has seen is missing."""
    known = {"w1-0001.seg": [SegmentObject(0, 10, 10, "other"), SegmentObject(20, 30, 30, "seen")]}
    source = ObjectSource(Recorded(), JOB, known)
    with pytest.raises(InputChanged):
        source.read("w1-0001.seg", 0, 10)
    with pytest.raises(StorageFailed, match="has no byte 10"):
        source.read("w1-0001.seg", 10, 5)
    with pytest.raises(FileNotFoundError):
        source.read("w3-0001.seg", 0, 1)


def test_refused_rows_from_any_row_on(tmp_path: Path) -> None:
    """Who needs the last of many refused rows does not read all others."""
    rows = [0, 3, 4, 70, 71, 500]
    lines = [f'{{"row":{row},"code":"c","message":"{"m" * (row % 60)}"}}\n' for row in rows]
    (tmp_path / "rejected.jsonl").write_text("".join(lines))
    for first in range(503):
        assert [each.row for each in iter_rejected(tmp_path, first)] == [row for row in rows if row >= first]
    (tmp_path / "rejected.jsonl").write_text("")
    assert list(iter_rejected(tmp_path, 3)) == []

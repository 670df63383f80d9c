"""Datasets in an object store are sealed where they lie, and read as files are."""

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import openai_row
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, s3_environment, s3_server

from batchmill.datasets import layout, sources
from batchmill.datasets.formats import resolve
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sources import ObjectSource, SourceFile, describe, unchanged
from batchmill.errors import AuthRefused, InputChanged, InvalidDataset, StorageFailed
from batchmill.object_store.urls import open_store

BUCKET = "datasets"
LINES = [openai_row(f"row-{n}", {"text": "x" * 600}) for n in range(3000)]
TEXT = b"".join(line + b"\n" for line in LINES)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def faulty(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    with ExitStack() as stack:
        stack.enter_context(bucket_client(s3, BUCKET))
        plan = stack.enter_context(faulty_objects(s3))
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        sources._store.cache_clear()
        yield plan
        sources._store.cache_clear()


@pytest.fixture
def put(faulty: FaultyObjects):
    store = open_store(f"s3://{BUCKET}")

    def put_object(key: str, data: bytes) -> str:
        store.put(key, data, overwrite=True)
        return f"s3://{BUCKET}/{key}"

    return put_object


def _rows(home, first: int = 0, last: int | None = None) -> list[bytes]:
    rows = open_rows(home)
    try:
        return rows.read(first, rows.rows if last is None else last)
    finally:
        rows.close()


def test_lines(put, sealed, home, write, faulty: FaultyObjects):
    """Lines are read where they lie, by validators in parallel and through faults, and have the digest of a file."""
    url = put("a/rows.jsonl", TEXT)
    faulty.fail("GET", "slow_down", "truncated", "short", "reset")
    seal = sealed(url).seal
    assert [file.path for file in seal.files] == [url]
    assert seal.files[0].etag
    assert seal.is_remote
    assert _rows(home) == LINES
    assert _rows(home, 7, 9) == LINES[7:9]
    rows = open_rows(home)
    assert rows.read_many([2999, 3, 1500]) == [LINES[2999], LINES[3], LINES[1500]]
    rows.close()
    assert sealed(write(TEXT)).seal.digest == seal.digest


def test_packed_files_and_tables(put, sealed, home):
    """Packed files and CSV are converted, as those of this machine are."""
    assert sealed(put("rows.jsonl.gz", gzip.compress(TEXT))).seal.rows == len(LINES)
    assert _rows(home) == LINES
    assert sealed(put("rows.csv", b"a,b\n1,x\n2,y\n")).seal.columns == ["a", "b"]
    assert _rows(home) == [b'{"a":"1","b":"x"}', b'{"a":"2","b":"y"}']


@pytest.mark.parametrize("columnar", [True, False])
def test_parquet(put, sealed, home, columnar: bool):
    """Parquet is read as columns where it lies, or converted to lines."""
    sink = pa.BufferOutputStream()
    table = pa.table({"number": range(20_000), "text": [f"t{n}" * 20 for n in range(20_000)]})
    pq.write_table(table, sink, row_group_size=5000)
    seal = sealed(put("rows.parquet", sink.getvalue().to_pybytes()), may_be_columnar=columnar).seal
    assert (seal.is_columnar, seal.is_remote) == (columnar, columnar)
    assert _rows(home, 19_999) == [b'{"number":19999,"text":"%s"}' % (b"t19999" * 20)]
    assert len(_rows(home)) == 20_000


def test_a_copy(put, sealed, home):
    """With `copy` the rows stay readable when the object is gone."""
    url = put("rows.jsonl", TEXT)
    sealed(url, spec={"copy": True})
    open_store(f"s3://{BUCKET}").delete("rows.jsonl")
    assert _rows(home) == LINES


def test_changed_objects(put, sealed, home):
    """Rows of an object that was replaced or removed are not read."""
    url = put("rows.jsonl", TEXT)
    sealed(url)
    file = describe(url)
    assert unchanged(file)
    put("rows.jsonl", TEXT.replace(b"row-1", b"row-2", 1))
    assert not unchanged(file)
    with pytest.raises(InputChanged, match=r"s3://datasets/rows\.jsonl changed since it was sealed"):
        _rows(home)
    open_store(f"s3://{BUCKET}").delete("rows.jsonl")
    assert not unchanged(file)
    with pytest.raises(InputChanged, match="is gone since it was sealed"):
        _rows(home)


def test_refused_credentials(put, sealed, home, faulty: FaultyObjects):
    """Credentials that are refused pause a job, wherever it reads; with others it goes on."""
    url = put("rows.jsonl", TEXT)
    faulty.always = {"GET": "denied"}
    with pytest.raises(AuthRefused):
        sealed(url)
    faulty.always = {}
    sealed(url)
    faulty.always = {"GET": "expired"}
    with pytest.raises(AuthRefused, match="give credentials"):
        _rows(home)
    faulty.always = {}
    assert _rows(home) == LINES


def test_variables_that_come_with_a_job(put, sealed, home, faulty: FaultyObjects, monkeypatch: pytest.MonkeyPatch):
    """A worker reads with the variables that came with the job: its own environment has none."""
    sealed(put("rows.jsonl", TEXT))
    variables = {**s3_environment(faulty.url), "AWS_ACCESS_KEY_ID": "sent"}
    for name in s3_environment(faulty.url):
        monkeypatch.delenv(name)
    rows = open_rows(home, access=variables)
    assert rows.read(0, 10) == LINES[:10]
    rows.close()
    assert "Credential=sent/" in faulty.requests[-1][2]["authorization"]


def test_a_store_that_is_down(put, sealed, home, faulty: FaultyObjects, monkeypatch: pytest.MonkeyPatch):
    """A store that does not answer pauses a job."""
    sealed(put("rows.jsonl", TEXT))
    monkeypatch.setattr(sources._store(f"s3://{BUCKET}", None), "_retry_s", 0.0)
    faulty.always = {"GET": "slow_down"}
    with pytest.raises(StorageFailed, match="try again later"):
        _rows(home)
    faulty.always = {}
    assert _rows(home) == LINES


def test_names(put):
    """A URL names an object, a folder or a glob; the list is sorted and has each object once."""
    keys = ["in/b.jsonl", "in/a.jsonl.gz", "in/.hidden.jsonl", "in/notes.txt", "in/deep/c.jsonl", "in/x.parquet"]
    urls = {key: put(key, b"{}") for key in keys}

    def found(*patterns: str, leave_out=()) -> list[str]:
        paths = resolve([f"s3://{BUCKET}/{pattern}" for pattern in patterns], leave_out)
        return [path.removeprefix(f"s3://{BUCKET}/in/") for path in paths]

    assert found("in/") == ["a.jsonl.gz", "b.jsonl", "x.parquet"]
    assert found("in/", leave_out=[urls["in/b.jsonl"]]) == ["a.jsonl.gz", "x.parquet"]
    assert found("in/*.jsonl", "in/b.jsonl") == [".hidden.jsonl", "b.jsonl"]
    assert found("in/**/*.jsonl") == [".hidden.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert found("in/?.[jp]*") == ["a.jsonl.gz", "b.jsonl", "x.parquet"]
    for pattern in ("none/", "in/*.csv", "no*/b.jsonl"):
        with pytest.raises(InvalidDataset) as caught:
            found(pattern)
        assert caught.value.code == "no_input"
    with pytest.raises(InvalidDataset, match="there is no object") as caught:
        describe(f"s3://{BUCKET}/in/missing.jsonl")


def test_reads_grow_and_run_ahead(put, faulty: FaultyObjects):
    """Reads that follow one another take few requests; scattered ones fetch little; memory is bounded."""
    data = bytes(range(256)) * 128 * 1024  # 32 MiB
    put("large", data)
    store = open_store(f"s3://{BUCKET}")
    info = store.head("large")
    before = faulty.count("GET")
    source = ObjectSource(store, info)
    step = 512 * 1024
    for start in range(0, len(data), step):
        assert source.read_at(start, start + step) == data[start : start + step]
        assert sum(each.end - each.start for each in source._ranges.values()) <= sources.KEPT_BYTES_MAX
    source.close()
    assert faulty.count("GET") - before <= 9
    source = ObjectSource(store, info)
    assert source.read_at(20_000_000, 20_000_010) == data[20_000_000:20_000_010]
    assert faulty.requests[-1][2]["range"] == f"bytes=20000000-{20_000_000 + sources.SCATTERED_BYTES - 1}"
    source.close()


def test_nothing_is_fetched_beyond_the_rows_of_a_shard(put, sealed, home, faulty: FaultyObjects):
    """Whoever reads on to a row, as a worker does to the end of its shard, fetches each byte to there once."""
    sealed(put("a/rows.jsonl", TEXT))
    faulty.requests.clear()
    rows = open_rows(home)
    first, until = 100, 1600
    for start in range(first, until, 300):
        end = start + 300
        assert rows.read_lines(start, end, until).split(b"\n")[:-1] == LINES[start:end]
    rows.close()
    spans = sorted(
        tuple(map(int, headers["range"].removeprefix("bytes=").split("-"))) for _, _, headers in faulty.requests
    )
    assert len(spans) > 1
    assert all(span[1] + 1 == following[0] for span, following in pairwise(spans)), "no byte is fetched twice"
    needed = sum(len(line) + 1 for line in LINES[first:until])
    assert sum(end + 1 - start for start, end in spans) <= needed + 2 * layout.BLOCK_BYTES


def test_a_source_as_a_file(put):
    """A source has the methods of a file."""
    store = open_store(f"s3://{BUCKET}")
    put("text", b"0123456789")
    with SourceFile(ObjectSource(store, store.head("text"))) as file:
        assert (file.size(), file.read(3), file.tell(), file.read()) == (10, b"012", 3, b"3456789")
        assert (file.seek(-2, 2), file.read(), file.read(1)) == (8, b"89", b"")
        buffer = bytearray(4)
        file.seek(4)
        assert (file.readinto(buffer), bytes(buffer)) == (4, b"4567")

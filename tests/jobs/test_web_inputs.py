"""Inputs of web servers: read once into the dataset, whatever their format."""

import gzip
import json

import msgspec
import pytest
from fakes.web_files import WebFile, web_files

from batchmill.children.process_end import boot_id
from batchmill.datasets.readers import open_rows
from batchmill.datasets.sealed import load_seal
from batchmill.errors import InputChanged, InvalidDataset, InvalidInput, OverQuota, StorageFailed, TooLarge
from batchmill.jobs.intake import fetching, orders
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder, prepare
from batchmill.types import DatasetSpec, JobOrder, ModelSpec

LINES = b"".join(b'{"n": %d}\n' % n for n in range(50))


@pytest.fixture(scope="module")
def server():
    with web_files() as web:
        yield web


@pytest.fixture
def web(server):
    server.files.clear()
    server.requests.clear()
    return server


@pytest.fixture
def seal(web, tmp_path):
    """Describes and prepares a job of inputs; returns what it says, and the dataset's folder."""
    (tmp_path / "app.py").write_text("def double(n):\n    return 2 * n\n")
    model = ModelSpec(name="double", engine="function", source=str(tmp_path / "app.py:double"))

    def run(*names, bytes_left=None, **fields):
        paths = [
            name if name.startswith("/") and (tmp_path / name[1:]).exists() else f"{web.url}{name}" for name in names
        ]
        paths = [str(tmp_path / path[1:]) if path.startswith("/") else path for path in paths]
        dataset = DatasetSpec(paths, private_hosts=["127.0.0.1"], **fields)
        spec = orders.describe(JobOrder(dataset, [model]), 1.0)
        home = tmp_path / "dataset"
        for folder in (home, tmp_path / "plan"):
            folder.mkdir(exist_ok=True)
        order = PrepareOrder(spec, str(home), str(tmp_path / "plan"), bytes_left=bytes_left, no_space_message="no room")
        return msgspec.json.decode(prepare(msgspec.json.encode(order), lambda _: None), type=Prepared), home

    return run


def rows_of(home):
    rows = open_rows(home, load_seal(home))
    try:
        return [json.loads(row) for row in rows.read(0, rows.rows)]
    finally:
        rows.close()


def test_plain_lines_are_read_where_they_were_downloaded(seal, web):
    """The body comes once; the seal names the URL and has the digest of the bytes."""
    web.files["/rows.jsonl?v=1"] = WebFile(LINES, headers={"Content-Type": "text/html"})
    prepared, home = seal("/rows.jsonl?v=1")
    assert rows_of(home) == [{"n": n} for n in range(50)]
    assert [path for path, _ in web.requests] == ["/rows.jsonl?v=1"] * 2  # the first bytes, then all
    sealed = load_seal(home)
    assert sealed.sources[0].path == f"{web.url}/rows.jsonl?v=1" and sealed.sources[0].etag == '"1"'
    assert [file.path for file in sealed.files] == [str(home / "fetched-000000.jsonl")]
    assert prepared.report.seal.files[0].path == f"{web.url}/rows.jsonl?v=1"
    assert sorted(path.name for path in home.glob("fetched-*")) == ["fetched-000000.jsonl"]


def test_packed_and_csv_files_are_converted_and_removed(seal, web, tmp_path):
    """Also beside a local file."""
    web.files["/a.jsonl.gz"] = WebFile(gzip.compress(LINES))
    web.files["/b.jsonl"] = WebFile(b'{"n": 7}\n')
    (tmp_path / "local.jsonl").write_bytes(b'{"n": 8}\n')
    _, home = seal("/a.jsonl.gz", "/local.jsonl", "/b.jsonl")
    assert [row["n"] for row in rows_of(home)] == [*range(50), 8, 7]
    assert not list(home.glob("fetched-*"))
    web.files["/c.csv"] = WebFile(b"n\n1\n2\n")
    _, home = seal("/c.csv")
    assert [row["n"] for row in rows_of(home)] == ["1", "2"]


def test_only_the_first_bytes_say_the_format(seal, web, monkeypatch):
    """A longer first row takes more of them; a URL without a suffix is JSON lines if it looks so."""
    monkeypatch.setattr(fetching, "HEAD_BYTES", 16)
    row = b'{"n": 1, "text": "%s"}\n' % (b"x" * 1000)
    web.files["/download?id=3"] = WebFile(row * 3)
    web.files["/openai.jsonl.gz"] = WebFile(gzip.compress(row * 3))
    for name in web.files:
        spec = DatasetSpec([f"{web.url}{name}"], private_hosts=["127.0.0.1"])
        assert fetching.detect_format(spec) == "jsonl"
    web.requests.clear()
    assert fetching.detect_format(DatasetSpec([f"{web.url}/x.parquet"], private_hosts=["127.0.0.1"])) == "parquet"
    assert not web.requests


def test_a_job_goes_on_where_it_was_interrupted(seal, web):
    """A second child process fetches only the rest."""
    web.files["/rows.jsonl"] = WebFile(LINES)
    seal("/rows.jsonl", format="jsonl")
    assert [range_ for _, range_ in web.requests] == [None]
    _, home = seal("/rows.jsonl", format="jsonl")
    assert [range_ for _, range_ in web.requests] == [None, None]  # its record went when it was planned
    (home / "fetched-000000.jsonl").write_bytes(LINES[:100])
    record = {"url": f"{web.url}/rows.jsonl", "etag": '"1"', "size_bytes": len(LINES), "is_complete": False}
    record["boot"] = boot_id().partition("/")[0]
    (home / "fetched-000000.jsonl.download").write_bytes(json.dumps(record).encode())
    seal("/rows.jsonl", format="jsonl")
    assert web.requests[-1] == ("/rows.jsonl", "bytes=100-") and len(rows_of(home)) == 50


def test_what_is_refused_leaves_nothing(seal, web, tmp_path):
    """Messages name the URL, not the copy."""
    web.files["/bad.jsonl"] = WebFile(b'[{"n": 1}]\n')
    web.files["/big.jsonl"] = WebFile(LINES)
    web.files["/empty.jsonl"] = WebFile(b"")
    cases = [
        ("/bad.jsonl", {}, InvalidDataset, "not_jsonl"),
        ("/none.jsonl", {}, InvalidDataset, "no_such_url"),
        ("/none.csv", {}, InvalidDataset, "no_such_url"),
        ("/empty.jsonl", {}, InvalidDataset, "empty_file"),
        ("/big.jsonl", {"download_bytes_max": 10}, TooLarge, "download_too_large"),
        ("/big.jsonl", {"bytes_left": 10}, OverQuota, "quota_exceeded"),
    ]
    for name, fields, kind, code in cases:
        with pytest.raises(kind) as error:
            seal(name, **fields)
        assert error.value.code == code, name
        assert str(tmp_path) not in error.value.message, name
        assert not list((tmp_path / "dataset").glob("fetched-*")), name
    web.files["/gone.jsonl"] = WebFile(status=503)
    with pytest.raises(StorageFailed, match="answers 503; try again later"):
        seal("/gone.jsonl")


def test_urls_that_are_not_allowed_are_refused_before_anything_is_read(web):
    for url in (
        "http://169.254.169.254/x.csv",
        "https://127.0.0.1/x.csv",
        "http://example.com/x.csv",
        "https://u:p@e.com/x",
    ):
        with pytest.raises(InvalidInput) as error:
            fetching.detect_format(DatasetSpec([url]))
        assert error.value.code == "url_not_allowed", url


def test_a_damaged_index_is_made_from_what_was_kept(seal, web):
    """Only a file that rows are read from is kept."""
    web.files["/rows.jsonl"] = WebFile(LINES)
    web.files["/rows.jsonl.gz"] = WebFile(gzip.compress(LINES))
    _, home = seal("/rows.jsonl")
    spec = fetching.kept(DatasetSpec([f"{web.url}/rows.jsonl"]), home)
    assert spec.paths == [str(home / "fetched-000000.jsonl")]
    seal("/rows.jsonl.gz")
    with pytest.raises(InputChanged, match="start over with --restart"):
        fetching.kept(DatasetSpec([f"{web.url}/rows.jsonl.gz"]), home)

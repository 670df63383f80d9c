"""Files and uploads, driven by the openai package as it is published, against a real server."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import time

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_story import ended, lines, result_lines, row, submit, until, write_project
from running_server import RunningServer

ROWS = lines([row(f"r{n}", f"text {n}") for n in range(200)])
PART_BYTES = 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai-files")
    write_project(folder, "[server]\nfile_bytes_max = 50000000\n")
    with RunningServer(folder) as running:
        yield running


@pytest.fixture
async def aclient(server):
    async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client


def left(server: RunningServer) -> list[str]:
    """What lies where bytes arrive."""
    home = server.folder / "data" / "files"
    return [path.name for folder in (".incoming", ".parts") for path in (home / folder).iterdir()]


def half_an_upload(server: RunningServer) -> socket.socket:
    """A connection over which half a file has come, some of it on the disk already."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    sock.sendall(
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5000000\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\n\r\n{head}".encode()
        + b"x" * 2_500_000
    )
    arriving = server.folder / "data" / "files" / ".incoming"
    until(lambda: [path for path in arriving.iterdir() if path.stat().st_size])
    return sock


def test_a_file_from_upload_to_deletion(client, server, tmp_path):
    """A file that was uploaded from a path is there, can be read whole or in pieces, and is gone once deleted."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS)
    before = int(time.time())
    file = client.files.create(file=path, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "rows.jsonl", len(ROWS), "batch")
    assert file.status == "processed" and before <= file.created_at and file.expires_at == file.created_at + 3600
    assert client.files.wait_for_processing(file.id) == client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == ROWS
    with client.files.with_streaming_response.content(file.id) as content:
        assert b"".join(content.iter_bytes(1000)) == ROWS
    ranged = client.files.content(file.id, extra_headers={"range": "bytes=10-19"})
    assert ranged.response.status_code == 206 and ranged.read() == ROWS[10:20]
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert caught.value.type == "invalid_request_error" and file.id in caught.value.message
    assert left(server) == []


async def test_a_file_without_blocking(aclient):
    """The asynchronous client does the same."""
    file = await aclient.files.create(file=("zwölf.jsonl", ROWS, "text/jsonl"), purpose="user_data")
    assert (file.filename, file.expires_at) == ("zwölf.jsonl", None)
    assert (await aclient.files.content(file.id)).content == ROWS
    assert [each.id async for each in aclient.files.list(purpose="user_data", limit=1)] == [file.id]
    assert (await aclient.files.delete(file.id)).deleted


def test_all_pages(client):
    """The package's own paging finds every file once, the newest first or last."""
    ids = [client.files.create(file=(f"{n}.txt", b"x"), purpose="vision").id for n in range(7)]
    assert [file.id for file in client.files.list(purpose="vision", limit=2, order="asc")] == ids
    assert [file.id for file in client.files.list(purpose="vision", limit=3)] == ids[::-1]
    page = client.files.list(purpose="vision", after=ids[1], order="asc")
    assert [file.id for file in page.data] == ids[2:] and page.has_more is False
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-unknown")


def test_an_upload_in_parts_runs_as_a_batch(client, server):
    """Parts become one file with the helper of the package, and a batch runs over it."""
    upload = client.uploads.upload_file_chunked(
        file=ROWS, filename="rows.jsonl", bytes=len(ROWS), mime_type="application/jsonl", purpose="batch",
        part_size=PART_BYTES, md5=hashlib.md5(ROWS).hexdigest(),
    )  # fmt: skip
    assert upload.status == "completed" and upload.file and upload.file.bytes == len(ROWS)
    assert client.files.content(upload.file.id).read() == ROWS
    batch = client.batches.create(
        input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert len(result_lines(client, ended(client, batch).output_file_id)) == 200
    assert left(server) == []


async def test_an_upload_by_hand(aclient, server):
    """Parts count in the order of the completion; a cancelled upload is gone."""
    fields = {"bytes": 6, "filename": "x.txt", "mime_type": "text/plain", "purpose": "user_data"}
    upload = await aclient.uploads.create(**fields)
    late, early = [
        (await aclient.uploads.parts.create(upload.id, data=io.BytesIO(data))).id for data in (b"def", b"abc")
    ]
    done = await aclient.uploads.complete(upload.id, part_ids=[early, late])
    again = await aclient.uploads.complete(upload.id, part_ids=[early, late])
    assert done == again and done.file
    assert (await aclient.files.content(done.file.id)).content == b"abcdef"
    other = await aclient.uploads.create(**fields)
    await aclient.uploads.parts.create(other.id, data=b"abc")
    assert (await aclient.uploads.cancel(other.id)).status == "cancelled"
    with pytest.raises(openai.ConflictError):
        await aclient.uploads.parts.create(other.id, data=b"def")
    with pytest.raises(openai.BadRequestError, match="md5"):
        wrong = await aclient.uploads.create(**fields)
        part = await aclient.uploads.parts.create(wrong.id, data=b"abcdef")
        await aclient.uploads.complete(wrong.id, part_ids=[part.id], md5="0" * 32)
    await aclient.uploads.cancel(wrong.id)
    assert left(server) == []


def test_a_file_that_a_batch_reads(client, server):
    """The input of a running batch cannot be deleted; when the batch has ended it can."""
    rows = [row("r0", "opened", "gated")]
    batch = submit(client, rows)
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.status == "in_progress")
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    (server.folder / "opened").touch()
    done = ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted
    assert len(result_lines(client, done.output_file_id)) == 1


def test_results_are_files(client):
    """Results are listed among the files, and stay deleted once they are, although the batch still names them."""
    batch = ended(client, submit(client, [row("a", "x"), row("b", "fail")]))
    assert batch.output_file_id and batch.error_file_id
    listed = {file.id: file for file in client.files.list(purpose="batch_output")}
    assert listed[batch.output_file_id].filename == f"{batch.id}_output.jsonl"
    assert listed[batch.error_file_id].filename == f"{batch.id}_errors.jsonl"
    assert json.loads(client.files.content(batch.error_file_id).text)["custom_id"] == "b"
    assert client.files.delete(batch.output_file_id).deleted
    client.batches.retrieve(batch.id)
    with pytest.raises(openai.APIStatusError, match="was deleted by") as caught:
        client.files.retrieve(batch.output_file_id)
    assert caught.value.status_code == 410
    assert client.files.retrieve(batch.error_file_id)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"purpose": "nonsense"}, "nonsense"),
        ({"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 60}}, "60"),
        ({"purpose": "batch", "extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_what_is_refused(client, server, fields, says):
    """A wrong field is a 400 in OpenAI's form that names it."""
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.files.create(file=("x.jsonl", ROWS), **fields)
    assert caught.value.type == "invalid_request_error" and caught.value.param
    assert left(server) == []


def test_a_file_that_is_too_large(client, server):
    """More bytes than the server takes are refused as such."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("x.jsonl", bytes(50_000_001)), purpose="batch")
    assert caught.value.status_code == 413
    assert left(server) == []


def test_files_outlive_the_server(tmp_path):
    """After a kill acknowledged files are there, an upload in parts goes on, and of half a file nothing is left."""
    write_project(tmp_path)
    with RunningServer(tmp_path) as server:
        client = OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)
        file = client.files.create(file=("rows.jsonl", ROWS), purpose="batch")
        upload = client.uploads.create(bytes=3, filename="x", mime_type="text/plain", purpose="user_data")
        part = client.uploads.parts.create(upload.id, data=b"abc")
        client.close()
        sock = half_an_upload(server)
        server.kill()
        sock.close()
        server.start()
        assert left(server) == [part.id]
        with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            assert client.files.content(file.id).read() == ROWS
            done = client.uploads.complete(upload.id, part_ids=[part.id])
            assert done.file and client.files.content(done.file.id).read() == b"abc"

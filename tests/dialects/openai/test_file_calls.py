"""/v1/files and /v1/uploads over HTTP: what is taken, what is refused, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource

import httpx2
import pytest
from openai.types import FileDeleted, FileObject, Upload
from openai.types.uploads import UploadPart
from server.file_frontend import open_file_frontend

from batchmill.config import ServerEntry
from batchmill.server.multipart import FORM_BYTES
from batchmill.types import Scope

LIMIT = 3_000_000
FILE = ("rows.jsonl", b'{"a":1}\n', "application/jsonl")
NEVER = "file-" + "0" * 24


@pytest.fixture
async def frontend(tmp_path):
    async with open_file_frontend(tmp_path, ServerEntry(file_bytes_max=LIMIT)) as frontend:
        yield frontend


@pytest.fixture
async def http(frontend):
    async with httpx2.AsyncClient(base_url=frontend.url, trust_env=False) as client:
        yield client


async def upload(http: httpx2.AsyncClient, content: bytes = FILE[1], name: str = FILE[0], **fields) -> FileObject:
    reply = await http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields})
    assert reply.status_code == 200, reply.text
    return FileObject.model_validate_json(reply.content, strict=True)


def error_of(reply: httpx2.Response, status: int) -> dict:
    """The error, which has OpenAI's form exactly."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def test_a_file_object(http):
    """An uploaded file is described as OpenAI describes it, processed at once."""
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = await upload(http, **fields)
    assert (file.bytes, file.filename, file.purpose, file.object) == (8, "rows.jsonl", "batch", "file")
    assert (file.status, file.status_details, file.expires_at) == ("processed", None, file.created_at + 3600)
    reply = await http.get(f"/v1/files/{file.id}")
    assert FileObject.model_validate_json(reply.content, strict=True) == file
    content = await http.get(f"/v1/files/{file.id}/content")
    assert content.content == FILE[1]
    deleted = await http.delete(f"/v1/files/{file.id}")
    assert FileDeleted.model_validate_json(deleted.content, strict=True).model_dump() == {
        "id": file.id,
        "deleted": True,
        "object": "file",
    }


@pytest.mark.parametrize("purpose", ["assistants", "batch", "fine-tune", "vision", "user_data", "evals"])
async def test_purposes(http, purpose):
    """Every purpose of OpenAI's is taken, and files are listed by it."""
    reply = await http.post("/v1/files", files={"file": FILE}, data={"purpose": purpose})
    await upload(http, purpose="batch" if purpose != "batch" else "vision")
    found = (await http.get("/v1/files", params={"purpose": purpose})).json()
    assert found["data"] == [reply.json()] and reply.json()["purpose"] == purpose


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "purpose", "missing_required_parameter"),
        ({"purpose": "batch_output"}, "purpose", "invalid_value"),
        ({"purpose": ""}, "purpose", "invalid_value"),
        ({"purpose": "batch", "colour": "red"}, "colour", "unknown_parameter"),
        ({"purpose": ["batch", "batch"]}, "purpose", "repeated_parameter"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[seconds]", "missing"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after[anchor]", "missing"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after[anchor]", "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "3599"}, "expires_after[seconds]", "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "2592001"}, "expires_after[seconds]", "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "-1"}, "expires_after[seconds]", "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "9" * 400}, "expires_after[seconds]", "invalid_value"),
        ({"purpose": "batch", "expires_after[seconds]": "٣٦٠٠"}, "expires_after[seconds]", "invalid_value"),
    ],
)
async def test_fields_that_are_wrong(frontend, http, fields, param, code):
    """A field that is missing, unknown, repeated or out of range is refused by its name, and no file is made."""
    error = error_of(await http.post("/v1/files", files={"file": FILE}, data=fields), 400)
    assert error["param"] == param and error["code"].startswith(code) and param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert frontend.left() == []


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("application/x-www-form-urlencoded", b"purpose=batch", 415),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data", b"--b\r\n", 400),
        ("multipart/form-data; boundary=other", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n', 400),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx', 400),
        ("multipart/form-data; boundary=b", b"", 400),
    ],
)
async def test_bodies_that_are_no_form(frontend, http, content_type, body, status):
    """What is not a form, has another boundary or ends in the middle is refused and leaves nothing."""
    error_of(await http.post("/v1/files", content=body, headers={"content-type": content_type}), status)
    assert frontend.left() == []


async def test_forms_that_hold_the_wrong_files(frontend, http):
    """A form with two files, none, or a text where the file should be is refused."""
    two = [("file", FILE), ("file", FILE)]
    none = {"data": (None, "x")}
    text = {"file": (None, "no file at all")}
    for files in (two, none, text):
        error_of(await http.post("/v1/files", files=files, data={"purpose": "batch"}), 400)
    assert frontend.left() == []


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "..\\..\\boot.ini", "a;b.jsonl", "zwölf.jsonl"])
async def test_names_play_no_tricks(frontend, http, name):
    """A path in a name leads nowhere: it is shown as it came, and saved under a plain name."""
    file = await upload(http, name=name)
    assert file.filename == name
    assert frontend.left() == [file.id]
    saved = (await http.get(f"/v1/files/{file.id}/content")).headers["content-disposition"]
    assert saved.startswith("attachment; filename=") and "/" not in saved and "\\" not in saved and ".." not in saved


@pytest.mark.parametrize("name", ["x" * 513, "a\tb"])
async def test_names_that_cannot_be_shown(frontend, http, name):
    """Names that are too long or hold control characters are refused."""
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\nx\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert error_of(await http.post("/v1/files", content=form, headers=headers), 400)["code"] == "invalid_filename"
    assert frontend.left() == []


async def test_a_file_has_a_largest_size(frontend, http):
    """The limit counts what arrives, whether its length was announced or not: the limit is taken, more is refused."""

    async def pieces(form: bytes):
        for at in range(0, len(form), 100_000):
            yield form[at : at + 100_000]

    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for size in (LIMIT + 1, LIMIT + FORM_BYTES + 1):
        form = head + b"x" * size + b"\r\n--b--\r\n"
        for content in (form, pieces(form)):
            reply = await http.post("/v1/files", content=content, headers=headers)
            assert error_of(reply, 413)["code"] in ("file_too_large", "request_too_large")
    assert frontend.left() == []
    form = head + b"x" * LIMIT + b"\r\n--b--\r\n"
    assert (await http.post("/v1/files", content=pieces(form), headers=headers)).json()["bytes"] == LIMIT


async def test_a_client_that_stops_in_the_middle(frontend):
    """When a connection ends in the middle of a file, nothing of it stays."""
    host, port = frontend.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2500000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2_200_000
    )
    await writer.drain()
    while not frontend.left():
        await asyncio.sleep(0)
    writer.transport.abort()
    async with asyncio.timeout(30):
        while frontend.left():
            await asyncio.sleep(0)
    assert await frontend.files.list("default") == ([], False)
    assert not reader.at_eof() or reader.exception() is None


async def test_lists(http):
    """Pages follow each other in both orders; first_id, last_id and has_more are those of the page."""
    ids = [(await upload(http, name=f"{n}.jsonl")).id for n in range(5)]
    found = (await http.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
    assert [each["id"] for each in found["data"]] == ids[:2] and found["object"] == "list"
    assert (found["first_id"], found["last_id"], found["has_more"]) == (ids[0], ids[1], True)
    found = (await http.get("/v1/files", params={"after": ids[2]})).json()
    assert ([each["id"] for each in found["data"]], found["has_more"]) == (ids[1::-1], False)
    empty = (await http.get("/v1/files", params={"after": ids[0]})).json()
    assert empty == {"data": [], "has_more": False, "first_id": None, "last_id": None, "object": "list"}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=x", "order=up", "purpose=x", "colour=red", "limit=1&limit=2"]
)
async def test_lists_that_cannot_be_asked_for(http, query):
    """A parameter that is out of range, unknown or there twice is refused by name."""
    error = error_of(await http.get(f"/v1/files?{query}"), 400)
    assert error["param"] == query.split("=")[0]


async def test_files_of_others(frontend, http):
    """Another project's file, an unknown one and a name that is not an id get the same answer everywhere."""
    key = (await frontend.keys.create(name="a", project="one", scope=Scope.SUBMIT)).key
    other = (await frontend.keys.create(name="b", project="two", scope=Scope.SUBMIT)).key
    http.headers["authorization"] = f"Bearer {key}"
    file = await upload(http)
    http.headers["authorization"] = f"Bearer {other}"
    assert (await http.get("/v1/files")).json()["data"] == []
    for method, path in (
        ("GET", "/v1/files/{}"),
        ("DELETE", "/v1/files/{}"),
        ("GET", "/v1/files/{}/content"),
        ("GET", "/v1/files?after={}"),
    ):
        said = []
        for file_id in (file.id, NEVER, "batchmill.db", "..%2f..%2fbatchmill.db", "%00"):
            reply = await http.request(method, path.format(file_id))
            error = error_of(reply, 404)
            said.append((error["type"], error["code"], error["message"].startswith("No such File object")))
        assert said[:3] == [("invalid_request_error", None, True)] * 3
    http.headers["authorization"] = f"Bearer {key}"
    assert (await http.get(f"/v1/files/{file.id}")).status_code == 200


async def test_a_key_that_may_only_look(frontend, http):
    """A key of scope read sees files and their bytes; it makes and removes none."""
    submit = (await frontend.keys.create(name="a", project="one", scope=Scope.SUBMIT)).key
    http.headers["authorization"] = f"Bearer {submit}"
    file = await upload(http)
    read = (await frontend.keys.create(name="b", project="one", scope=Scope.READ)).key
    http.headers["authorization"] = f"Bearer {read}"
    assert (await http.get(f"/v1/files/{file.id}/content")).content == FILE[1]
    error_of(await http.delete(f"/v1/files/{file.id}"), 403)
    error_of(await http.post("/v1/files", files={"file": FILE}, data={"purpose": "batch"}), 403)
    error_of(await http.post("/v1/uploads", json={}), 403)


# Content


async def test_ranges(http):
    """A download can be taken up where it stopped; a range that is not there is refused with the size."""
    data = bytes(range(256)) * 8192
    file = await upload(http, data)
    path = f"/v1/files/{file.id}/content"
    whole = await http.get(path)
    assert whole.content == data and whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["content-length"] == str(len(data))
    part = await http.get(path, headers={"range": "bytes=1000000-"})
    assert (part.status_code, part.content) == (206, data[1_000_000:])
    assert part.headers["content-range"] == f"bytes 1000000-{len(data) - 1}/{len(data)}"
    assert (await http.get(path, headers={"range": "bytes=-5"})).content == data[-5:]
    beyond = await http.get(path, headers={"range": f"bytes={len(data)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(data)}")
    assert (await http.get(path, headers={"range": "bytes=0-1,4-5"})).status_code == 200
    etag = whole.headers["etag"]
    for if_range, status in ((etag, 206), ('"another"', 200), ("Sat, 21 Nov 2026 22:00:00 GMT", 200)):
        reply = await http.get(path, headers={"range": "bytes=0-3", "if-range": if_range})
        assert reply.status_code == status


async def test_heads(http):
    """HEAD says what GET would, without the bytes."""
    file = await upload(http, b"x" * 5000)
    path = f"/v1/files/{file.id}/content"
    head, get = await http.head(path), await http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-length", "etag", "content-type", "content-disposition", "accept-ranges"):
        assert head.headers[name] == get.headers[name]
    ranged = await http.head(path, headers={"range": "bytes=0-9"})
    assert (ranged.status_code, ranged.headers["content-length"]) == (206, "10")
    empty = await upload(http, b"")
    assert (await http.get(f"/v1/files/{empty.id}/content")).content == b""


# Uploads


async def test_an_upload_in_parts(http):
    """An upload, its parts and the file it becomes are described as OpenAI describes them."""
    body = {"bytes": 6, "filename": "rows.jsonl", "mime_type": "text/jsonl", "purpose": "batch"}
    body["expires_after"] = {"anchor": "created_at", "seconds": 3600}
    reply = await http.post("/v1/uploads", json=body)
    begun = Upload.model_validate_json(reply.content, strict=True)
    assert (begun.status, begun.bytes, begun.expires_at, begun.file) == ("pending", 6, begun.created_at + 3600, None)
    parts = []
    for data in (b"def", b"abc"):
        reply = await http.post(f"/v1/uploads/{begun.id}/parts", files={"data": ("upload", data)})
        part = UploadPart.model_validate_json(reply.content, strict=True)
        assert (part.object, part.upload_id) == ("upload.part", begun.id)
        parts.append(part.id)
    reply = await http.post(f"/v1/uploads/{begun.id}/complete", json={"part_ids": parts[::-1]})
    done = Upload.model_validate_json(reply.content, strict=True)
    assert done.status == "completed" and done.file and done.file.expires_at == done.file.created_at + 3600
    assert (await http.get(f"/v1/files/{done.file.id}/content")).content == b"abcdef"
    assert error_of(await http.post(f"/v1/uploads/{begun.id}/cancel"), 409)["code"] == "upload_not_pending"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": -1}, "bytes"),
        ({"bytes": "6"}, "bytes"),
        ({"bytes": 1.5}, "bytes"),
        ({"filename": ""}, "filename"),
        ({"filename": "x" * 513}, "filename"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"mime_type": ""}, "mime_type"),
        ({"mime_type": None}, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after.anchor"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_uploads_that_cannot_be(http, change, param):
    """Every field that is wrong is refused by its name."""
    body = {"bytes": 6, "filename": "rows.jsonl", "mime_type": "text/jsonl", "purpose": "batch", **change}
    assert error_of(await http.post("/v1/uploads", json=body), 400)["param"] == param


async def test_an_upload_larger_than_any_file(frontend, http):
    """What could never become a file is refused before its first part."""
    body = {"bytes": LIMIT + 1, "filename": "rows.jsonl", "mime_type": "text/jsonl", "purpose": "batch"}
    assert error_of(await http.post("/v1/uploads", json=body), 413)["code"] == "file_too_large"


async def test_parts_that_are_no_parts(frontend, http):
    """A part with another field, without data or for no upload is refused and leaves nothing."""
    body = {"bytes": 6, "filename": "rows.jsonl", "mime_type": "text/jsonl", "purpose": "batch"}
    begun = (await http.post("/v1/uploads", json=body)).json()["id"]
    path = f"/v1/uploads/{begun}/parts"
    error_of(await http.post(path, files={"data": b"x"}, data={"more": "y"}), 400)
    error_of(await http.post(path, files={"file": b"x"}), 400)
    error_of(await http.post(path, files=[("data", b"x"), ("data", b"y")]), 400)
    error_of(await http.post(f"/v1/uploads/upload_{0:024}/parts", files={"data": b"x"}), 404)
    error_of(await http.post(f"/v1/uploads/{begun}/complete", json={"part_ids": ["part_0"]}), 400)
    error_of(await http.post(f"/v1/uploads/{begun}/complete", json={"part_ids": [], "md5": "x"}), 400)
    assert frontend.left() == []


async def test_many_at_once(frontend, http):
    """Files that arrive at the same time do not get into each other."""
    contents = [json.dumps({"n": n}).encode() * 20_000 for n in range(12)]
    files = await asyncio.gather(*(upload(http, content) for content in contents))
    got = await asyncio.gather(*(http.get(f"/v1/files/{file.id}/content") for file in files))
    assert [reply.content for reply in got] == contents
    with contextlib.suppress(FileNotFoundError):
        assert not list((frontend.data_dir / "files" / ".incoming").iterdir())


async def test_a_full_disk(frontend, http):
    """An upload that finds no room is answered 503 in OpenAI's form, and takes none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))  # as a quota: no file grows beyond it
    try:
        reply = await http.post("/v1/files", files={"file": b"x" * 2_500_000}, data={"purpose": "batch"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error_of(reply, 503)["code"] == "storage_full"
    assert frontend.left() == []
    assert (await upload(http, b"x" * 2_500_000)).bytes == 2_500_000

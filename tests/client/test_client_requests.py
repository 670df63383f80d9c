"""What a client sends and when it sends it again, over a transport that answers as a test says."""

import io

import msgspec
import pytest

from batchmill.client import calls
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.inputs import described
from batchmill.client.messages import ATTEMPTS_MAX, Broken, HttpReply
from batchmill.errors import (
    BatchmillError,
    Conflict,
    Forbidden,
    InvalidInput,
    InvalidTransition,
    RateLimited,
    StorageFull,
    Unauthenticated,
    Unavailable,
    UnknownName,
)
from batchmill.types import JobView, RetryChange
from batchmill.wire.native import Accepted, ErrorDetail, ErrorReply, FileInfo, FilePage, Work

FILE = FileInfo("file-1", "in.jsonl", "batch", 3, 1.0)
VIEW = JobView("job_1", "validating")


def answer(value=None, status=200, **headers):
    return HttpReply(status, headers, b"" if value is None else msgspec.json.encode(value))


def refused(status, code="c", *, retryable=False, **headers):
    return answer(ErrorReply(ErrorDetail(code, "no", "caller", retryable, "req_1")), status, **headers)


class Script:
    """A transport that answers each request with the next answer, and notes what it carries."""

    def __init__(self, answers):
        self.answers, self.requests = list(answers), []

    async def send(self, request, file=None):
        self.requests.append(request)
        if file is not None:
            file.read()
        reply = self.answers.pop(0)
        if isinstance(reply, Broken):
            raise reply
        return reply


class Scripted(AsyncClient):
    """A client over a script. It notes how long it would wait, and does not."""

    def __init__(self, *answers):
        self.script, self.waits = Script(answers), []
        super().__init__(transport=self.script)

    async def sleep(self, seconds):
        self.waits.append(seconds)

    @property
    def sent(self):
        """ "METHOD path" of each request. Every answer has been used by then."""
        assert self.script.answers == []
        return [f"{request.method} {request.path}" for request in self.script.requests]


GONE = Broken("gone", was_sent=True)
UNSENT = Broken("nobody there", was_sent=False)


async def test_a_look_is_repeated_until_there_is_an_answer():
    """Asking how a job is survives lost replies, gateways that time out and a server that asks for patience."""
    busy = refused(503, retryable=True, **{"retry-after": "7"})
    client = Scripted(UNSENT, GONE, answer(status=504), busy, answer(VIEW))
    assert (await client.job("job_1")).view == VIEW and len(client.sent) == 5
    assert len(client.waits) == 4 and client.waits[-1] >= 7 and all(0 < wait <= 20 for wait in client.waits)


async def test_patience_ends():
    """After the fifth attempt the caller hears what the last one said."""
    client = Scripted(*[GONE] * ATTEMPTS_MAX)
    with pytest.raises(Unavailable, match="gone") as caught:
        await client.job("job_1")
    assert len(client.sent) == ATTEMPTS_MAX
    assert caught.value.code == "unreachable"


@pytest.mark.parametrize("lost", [GONE, refused(503, retryable=True), answer(status=502)])
async def test_what_may_have_been_done_is_not_asked_for_twice(lost):
    """A retry of rows whose reply was lost is not sent again: it might open another generation."""
    with pytest.raises(BatchmillError):
        await Scripted(lost).call(calls.retry("job_1", RetryChange()))


@pytest.mark.parametrize("early", [UNSENT, refused(429, "rate_limit_exceeded", retryable=True)])
async def test_what_was_not_done_is_asked_for_again(early):
    """A request that never arrived, or was refused for coming too often, is sent again whatever it is."""
    view = await Scripted(early, answer(VIEW)).call(calls.retry("job_1", RetryChange()))
    assert view == VIEW


async def test_a_full_disk_is_not_waited_for():
    """A refusal that the server does not call retryable is told at once."""
    with pytest.raises(StorageFull):
        await Scripted(refused(503, "storage_full")).call(calls.show("job_1"))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_field", InvalidInput), (401, "invalid_api_key", Unauthenticated), (403, "forbidden", Forbidden),
        (404, "unknown_job", UnknownName), (409, "invalid_transition", InvalidTransition),
        (409, "file_in_use", Conflict), (418, "teapot", InvalidInput), (500, "internal_error", BatchmillError),
    ],
)  # fmt: skip
async def test_refusals_are_raised_as_the_errors_they_are(status, code, kind):
    """Class, code, message and request id of an error survive the wire."""
    with pytest.raises(kind) as caught:
        await Scripted(refused(status, code)).call(calls.steer("job_1", "pause"))
    error = caught.value
    assert type(error) is kind and (error.code, error.message, error.request_id) == (code, "no", "req_1")


async def test_who_asks_too_often_hears_when_to_come_again():
    """A limit says after how long it no longer is one."""
    reply = refused(429, "rate_limit_exceeded", retryable=False, **{"retry-after": "3"})
    with pytest.raises(RateLimited) as caught:
        await Scripted(reply).call(calls.show("job_1"))
    assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize(
    "body", [b"<html>Bad Gateway</html>", b"", b"\xff", b'{"error": "x"}', b'{"error": {"code": 1}}']
)
async def test_a_reply_of_something_else_is_an_error_too(body):
    """What a proxy or another server answers becomes an error with the status and the text."""
    with pytest.raises(BatchmillError, match="500") as caught:
        await Scripted(HttpReply(500, {}, body)).call(calls.show("job_1"))
    assert caught.value.code == "http_500"


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff\xfe", b'{"id": 1}'])
async def test_a_success_that_cannot_be_read_is_an_error(body):
    """A page of something else at the same address is not a job."""
    with pytest.raises(BatchmillError, match="cannot read"):
        await Scripted(HttpReply(200, {}, body)).call(calls.show("job_1"))


async def test_a_job_is_submitted_with_a_key_of_its_own(tmp_path):
    """Files are uploaded first; when the reply to the order is lost, the same order goes out under the same key."""
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    client = Scripted(answer(FILE, 201), GONE, answer(Accepted("repeated", VIEW), 201))
    job = await client.submit([path, "file-9"], model="m", labels={"a": "b"})
    assert job.view == VIEW
    assert client.sent == ["POST /batchmill/v1/files", *["POST /batchmill/v1/jobs"] * 2]
    upload, first, second = client.script.requests
    assert first == second and len(first.headers["idempotency-key"]) == 32
    assert msgspec.json.decode(first.body) | {} == {
        **msgspec.json.decode(first.body), "files": ["file-1", "file-9"], "models": ["m"], "labels": {"a": "b"},
    }  # fmt: skip
    assert upload.headers["content-length"] == "3" and upload.query == {"filename": "in.jsonl"}


async def test_a_refused_job_leaves_no_upload_behind(tmp_path):
    """What was uploaded for a job that the server refuses is deleted; a file that was there before stays."""
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    client = Scripted(answer(FILE, 201), refused(400), answer(None, 204))
    with pytest.raises(InvalidInput):
        await client.submit([path, "file-9"])
    assert client.sent == ["POST /batchmill/v1/files", "POST /batchmill/v1/jobs", "DELETE /batchmill/v1/files/file-1"]


async def test_files_of_a_job_that_may_exist_are_kept(tmp_path):
    """Where no reply to the order ever came the job may run: its input is not taken from it."""
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    client = Scripted(answer(FILE, 201), *[GONE] * ATTEMPTS_MAX)
    with pytest.raises(Unavailable):
        await client.submit(path)
    assert not any(each.startswith("DELETE") for each in client.sent)


async def test_a_preview_leaves_nothing_behind(tmp_path):
    """What was uploaded to be looked at is deleted again; that the deletion fails is nobody's concern."""
    path = tmp_path / "in.csv"
    path.write_text("a\n1\n")
    client = Scripted(answer(FILE, 201), answer({"report": REPORT, "plan": None}), refused(404, "unknown_file"))
    assert (await client.plan(str(path), model="m")).plan is None
    assert client.sent[-1] == "DELETE /batchmill/v1/files/file-1"


REPORT = {
    "seal": {"rows": 1, "bytes": 2, "digest": "s", "format": "csv", "columns": ["a"], "files": [], "sources": []},
    "problems": [], "problems_total": 0, "rejected": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"modle": "m"}, "did you mean 'model'"),
        ({"model": "m", "models": ["n"]}, "two names of one thing"),
        ({"files": ["x"]}, "no field 'files'"),
        ({"priority": 101}, "priority"),
        ({"labels": {"": "x"}}, "labels"),
        ({"budget": "much"}, "budget"),
        ({"output_format": "xml"}, "output_format"),
        ({"fail_on": ["long"]}, "known are truncated, filtered, refused, empty, repeating"),
        ({"model": ["a", "b"]}, "models a list"),
    ],
)
async def test_wrong_fields_are_refused_before_anything_is_sent(options, expected):
    """A field nobody knows, or a value out of range, is named; no file has been uploaded for it."""
    with pytest.raises(InvalidInput, match=expected):
        await Scripted().submit("in.jsonl", **options)


def test_a_look_takes_no_field_that_would_do_nothing():
    """A preview knows no budget: nothing is accepted and then ignored."""
    with pytest.raises(InvalidInput, match="no field 'budget'"):
        described(Work, ["file-1"], {"budget": 1.0})


async def test_files_that_cannot_be_read_are_named():
    """A path that leads nowhere is an error that says so; an id of a file is not a path."""
    with pytest.raises(InvalidInput, match="/nowhere/in.jsonl cannot be read"):
        await Scripted().submit("/nowhere/in.jsonl")


async def test_a_file_object_without_a_name_needs_one():
    """What a file holds is told by the end of its name: bytes without any are not guessed at."""
    with pytest.raises(InvalidInput, match="filename="):
        await Scripted().upload(io.BytesIO(b"{}"))
    client = Scripted(answer(FILE, 201))
    assert await client.upload(io.BytesIO(b"{}"), filename="x.csv", expires_s=60) == FILE
    request = client.script.requests[0]
    assert request.query == {"filename": "x.csv", "expires_s": "60"} and "content-length" not in request.headers


async def test_an_upload_is_not_repeated(tmp_path):
    """A connection that breaks in the middle of a file is told: half a file may be there already."""
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n")
    client = Scripted(GONE)
    with pytest.raises(Unavailable):
        await client.upload(path)
    assert client.sent == ["POST /batchmill/v1/files"]


async def test_pages_are_turned_until_the_last():
    """Each page is asked for with what the one before said; the last says nothing."""
    client = Scripted(answer(FilePage([FILE], "file-1")), answer(FilePage([])))
    assert [info async for info in client.files()] == [FILE]
    assert len(client.sent) == 2 and [request.query for request in client.script.requests] == [{}, {"after": "file-1"}]


def test_ids_cannot_leave_their_place_in_a_path():
    """Slashes and dots of an id are sent as parts of a name."""
    assert calls.show("../keys?x=1#y").request.path == "/batchmill/v1/jobs/..%2Fkeys%3Fx%3D1%23y"


async def test_rows_in_memory_are_refused_with_what_to_do():
    """A data frame, rows and their bytes are not files: before anything is sent it is said how they become one."""
    frame = type("DataFrame", (), {"to_parquet": None, "__iter__": lambda self: iter("ab")})()
    for inputs, way in (
        (frame, "to_parquet"),
        ([frame], "to_parquet"),
        ({"a": 1}, "JSON object a line"),
        ([{"a": 1}], "JSON object a line"),
        (b"{}", "JSON object a line"),
        (3, "JSON object a line"),
    ):
        with pytest.raises(InvalidInput, match=way):
            await Scripted().submit(inputs, model="m")

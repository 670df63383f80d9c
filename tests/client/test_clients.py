"""The asyncio and the blocking client over a real connection, broken ones included."""

import io
import subprocess
import sys
from functools import reduce
from operator import or_
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from client.scripted_server import ScriptedServer, reply
from msgspec import UnsetType

import batchmill
from batchmill.client import bundling
from batchmill.client.async_resources import AsyncJob
from batchmill.client.asynchronous import AsyncClient
from batchmill.client.connection import address
from batchmill.client.inputs import DeployOptions, JobOptions, LlmChanges, LlmOptions, WorkOptions
from batchmill.client.sync import Client
from batchmill.client.sync_resources import Job
from batchmill.errors import InvalidInput, Unavailable, UnknownName
from batchmill.types import JobView
from batchmill.wire.bundles import DeployOrder
from batchmill.wire.native import ErrorDetail, ErrorReply, FileInfo, JobPage, ModelList, NewJob, Work
from batchmill.wire.native_models import LlmChange, NewLlm

VIEW = JobView("job_1", "running")
FILE = msgspec.json.encode(FileInfo("file-1", "x.jsonl", "batch", 3, 1.0))
ETAG = {"etag": '"f"', "content_type": "application/jsonl"}


def test_the_blocking_client_is_current():
    """The blocking client is what tools/generate_sync.py makes of the asyncio one."""
    tool = Path(__file__).parents[2] / "tools" / "generate_sync.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def types_of(kind):
    """The fields of a struct or keywords of a TypedDict, without what says that one is left out."""
    return {name: _without_unset(hint) for name, hint in get_type_hints(kind).items()}


def _without_unset(hint):
    kinds = get_args(hint)
    return reduce(or_, (each for each in kinds if each is not UnsetType)) if UnsetType in kinds else hint


def test_the_typed_keywords_are_the_fields():
    """An editor offers exactly the fields that the server takes, with their types."""
    for options, struct, own, added in (
        (WorkOptions, Work, {"files", "schema"}, {"model", "schema", "schema_requirements"}),
        (JobOptions, NewJob, {"files", "schema"}, {"model", "schema", "schema_requirements"}),
        (LlmOptions, NewLlm, {"name", "base_model"}, set()),
        (LlmChanges, LlmChange, set(), set()),
        (DeployOptions, DeployOrder, bundling.OWN, {
            "include", "input_json", "output_json", "dataframe_mode", "example_dataframe",
        }),
    ):  # fmt: skip
        keywords, known = types_of(options), types_of(struct)
        assert {name: kind for name, kind in keywords.items() if name not in added} == {
            name: kind for name, kind in known.items() if name not in own
        }
        assert added <= set(keywords)


def test_the_public_names_are_these():
    """`batchmill.Client` and `batchmill.AsyncClient` are the shells."""
    assert batchmill.Client is Client and batchmill.AsyncClient is AsyncClient


def test_the_environment_says_where_and_with_what_key():
    """BATCHMILL_SERVER and BATCHMILL_API_KEY stand in for arguments; an address for the openai package will do."""
    environ = {"BATCHMILL_SERVER": "http://h:1/v1/", "BATCHMILL_API_KEY": "bm_1"}
    found = address(None, None, environ)
    assert found.base_url == "http://h:1" and found.headers["authorization"] == "Bearer bm_1"
    assert "authorization" not in address("http://h:1", None, {}).headers


@pytest.mark.parametrize("url", [None, "", "127.0.0.1:8000", "ftp://h", "http://", "http://u:p@h", "http://h?x=1"])
def test_an_address_that_is_none_is_refused(url):
    """What cannot be asked is refused before anything is sent, with how an address looks."""
    with pytest.raises(InvalidInput):
        address(url, None, {})


def test_a_key_that_no_header_can_hold_is_refused():
    """A line end in a key would become another header; the key itself is not repeated."""
    with pytest.raises(InvalidInput) as caught:
        address("http://h", "bm_1\r\nx: y", {})
    assert "bm_1" not in caught.value.message


def test_nobody_there_is_said():
    """A server that is not running is unreachable, with its address."""
    with ScriptedServer([]) as server:
        url = server.url
    with Impatient(url) as client, pytest.raises(Unavailable, match="cannot be reached") as caught:
        client.models()
    assert caught.value.code == "unreachable" and url in caught.value.message


class Impatient(Client):
    """A client that does not wait between attempts."""

    def sleep(self, seconds):
        assert seconds > 0


def test_lists_turn_their_pages():
    """Every job of every page comes out, the next page asked for only when it is needed."""
    pages = [JobPage([VIEW], "job_1"), JobPage([JobView("job_2", "paused")])]
    with ScriptedServer([reply(msgspec.json.encode(page)) for page in pages]) as server, Client(server.url) as client:
        assert [view.id for view in client.jobs(state="running", label="a=b")] == ["job_1", "job_2"]
    assert server.asked[1].line == "GET /batchmill/v1/jobs?state=running&label=a%3Db&after=job_1 HTTP/1.1"


async def test_lists_turn_their_pages_with_asyncio():
    """The same, without blocking."""
    page = msgspec.json.encode(JobPage([VIEW]))
    with ScriptedServer([reply(page)]) as server:
        async with AsyncClient(server.url, "bm_1") as client:
            assert [view.id async for view in client.jobs()] == ["job_1"]
    assert server.asked[0].headers["authorization"] == "Bearer bm_1"


def test_a_file_is_uploaded_as_it_is(tmp_path):
    """The body is the file, its length said before; a file object is sent in pieces."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n")
    with ScriptedServer([reply(FILE, "201 Created")] * 2) as server, Client(server.url) as client:
        assert client.upload(path, expires_s=60).id == "file-1"
        client.upload(io.BytesIO(b"{}\n"), filename="y.jsonl")
    first, second = server.asked
    assert first.line == "POST /batchmill/v1/files?filename=x.jsonl&expires_s=60 HTTP/1.1"
    assert first.body == b"{}\n" and "transfer-encoding" not in first.headers
    assert second.headers["transfer-encoding"] == "chunked" and b"{}\n" in second.body


async def test_a_file_is_uploaded_with_asyncio(tmp_path):
    """The same, without blocking."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n")
    with ScriptedServer([reply(FILE, "201 Created")]) as server:
        async with AsyncClient(server.url) as client:
            await client.upload(path)
    assert server.asked[0].body == b"{}\n"


TEXT = b'{"a":1}\n{"a":2}\n{"a":3}\n'


def _rest(asked):
    at = int(asked.headers["range"].removeprefix("bytes=").removesuffix("-"))
    return reply(TEXT[at:], "206 Partial Content", **ETAG)


def _job(client):
    return Job(client, VIEW) if isinstance(client, Client) else AsyncJob(client, VIEW)


def test_a_download_that_breaks_is_taken_up():
    """Rows come out once each although the connection broke in the middle of one."""
    broken = reply(TEXT, **ETAG)[:-10]
    with ScriptedServer([broken, _rest]) as server, Client(server.url) as client:
        assert list(_job(client).results()) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert server.asked[1].headers["if-range"] == '"f"'


async def test_a_download_that_breaks_is_taken_up_with_asyncio(tmp_path):
    """The same without blocking, and into a file that has its name only once it is whole."""
    target = tmp_path / "out.jsonl"
    broken = reply(TEXT, **ETAG)[:-10]
    with ScriptedServer([broken, _rest]) as server:
        async with AsyncClient(server.url) as client:
            await _job(client).download(target)
    assert target.read_bytes() == TEXT and [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_download_that_fails_leaves_nothing(tmp_path):
    """An error file that is not there leaves no empty one, and what was there stays."""
    target = tmp_path / "out.jsonl"
    target.write_text("before")
    gone = msgspec.json.encode(ErrorReply(ErrorDetail("no_file", "no error file", "caller")))
    with ScriptedServer([reply(gone, "404 Not Found")]) as server, Client(server.url) as client:
        job = _job(client)
        with pytest.raises(UnknownName):
            job.download(target, errors=True)
    assert target.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def events(*views, ended=True):
    data = b"".join(b"id: %d\nevent: view\ndata: %b\n\n" % (n, msgspec.json.encode(v)) for n, v in enumerate(views))
    return reply(data + (b"event: end\ndata: {}\n\n" if ended else b""), content_type="text/event-stream")


DONE = JobView("job_1", "completed")


def test_waiting_survives_a_restart():
    """A server that closes the stream without an end is asked again, and says how it ended."""
    with ScriptedServer([events(VIEW, ended=False), events(DONE)]) as server, Client(server.url) as client:
        assert _job(client).wait() == DONE
    assert server.asked[1].headers["last-event-id"] == "0"


async def test_waiting_has_a_limit():
    """Who waits no longer than so gets a TimeoutError, and the job keeps its state."""
    with ScriptedServer([events(VIEW, ended=False)]) as server:
        async with AsyncClient(server.url) as client:
            job = _job(client)
            with pytest.raises(TimeoutError, match="job_1 is running after 0 s"):
                await job.wait(timeout_s=0)
            assert job.view == VIEW


def test_models_are_named():
    """A reply is a struct of batchmill's, not a dictionary."""
    body = msgspec.json.encode({"models": [{"name": "m", "engine": "llm", "adapters": ["a"]}], "more": 1})
    with ScriptedServer([reply(body)]) as server, Client(server.url) as client:
        assert client.models() == msgspec.json.decode(body, type=ModelList).models

"""Modelbit's cases over HTTP, against a whole server. The numbers are those of the reference's table F1."""

from __future__ import annotations

import json
import time

import pytest
import pytest_asyncio
from dialects.modelbit.modelbit_kit import deploy, open_deployments

pytestmark = pytest.mark.asyncio(loop_scope="module")

FUNCTIONS = ("doubler", "echo3", "of_dict", "nothing", "odd", "slow", "exits", "many", "counting")
CONFIG = """
[models.double]
engine = "function"
source = "app.py:double"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed(tmp_path_factory):
    async with open_deployments(tmp_path_factory.mktemp("modelbit"), *FUNCTIONS, config=CONFIG) as deployed:
        yield deployed


@pytest.mark.parametrize(
    ("place", "data", "expected"),
    [
        pytest.param("doubler/latest", [[1, 10], [2, 11], [3, 12]], [[1, 20], [2, 22], [3, 24]], id="M1"),
        pytest.param("of_dict/latest", [[1, {"my_key": 25}], [2, {"my_key": 30}]], [[1, 50], [2, 60]], id="M2"),
        pytest.param(
            "echo3/latest", [[1, 1, "two", 3.0], [2, 4, "five", 6.0]],
            [[1, [1, "two", 3.0]], [2, [4, "five", 6.0]]], id="M3",
        ),
        pytest.param("doubler/latest", [["a", 10]], [["a", 20]], id="M5"),
        pytest.param("doubler/latest", [[3, 1], [1, 2]], [[3, 2], [1, 4]], id="M7"),
        pytest.param("doubler/latest", [[1, 1], [1, 2]], [[1, 2], [1, 4]], id="ids twice"),
        pytest.param("doubler/latest", [[None, 1], [{"k": [1]}, 2]], [[None, 2], [{"k": [1]}, 4]], id="any id"),
        pytest.param("doubler/latest", 10, 20, id="M9"),
        pytest.param("doubler/latest", "ab", "abab", id="hints never coerce"),
        pytest.param("doubler/latest", [1, 10], [1, 10, 1, 10], id="M11"),
        pytest.param("doubler/latest", [], [], id="empty"),
        pytest.param("echo3/latest", [1, "two", 3.0], [1, "two", 3.0], id="single by position"),
        pytest.param("echo3/latest", {"c": 3.0, "a": 1, "b": "two"}, [1, "two", 3.0], id="single by name"),
        pytest.param("nothing/latest", [[1]], [[1, 7]], id="M17"),
        pytest.param("odd/latest", [[1, "numpy"]], [[1, [3, True, [1, 2], None]]], id="M19"),
        pytest.param("odd/latest", [[1, "date"]], [[1, "2024-01-02 00:00:00"]], id="M21"),
        pytest.param("odd/latest", [[1, "object"]], [[1, {"x": 1}]], id="M23"),
        pytest.param("odd/latest", [[1, "nan"]], [[1, [None, [None, 1.5]]]], id="NaN"),
        pytest.param("many/latest", [[1, "a"], [2, "b"]], [[1, "a!"], [2, "b!"]], id="batched"),
        pytest.param("doubler/latest", [[0, 2**62]], [[0, 2**63]], id="64 bits"),
    ],
)  # fmt: skip
async def test_answers(deployed, place, data, expected):
    """A batch is answered row by row in the order of the request, and anything else as one call."""
    assert await deployed.answer(place, data) == expected


async def test_ids_come_back_as_they_were_written(deployed):
    """An id is echoed byte for byte: 1.0 stays 1.0, and a number beyond any double keeps its digits."""
    body = b'{"data": [[1.0, 1], [123456789012345678901234567890, 2], ["\\u00e9", 3]]}'
    reply = await deployed.http.post("/v1/doubler/latest", content=body)
    assert reply.content == b'{"data":[[1.0,2],[123456789012345678901234567890,4],["\\u00e9",6]]}'
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("place", "data", "status", "last"),
    [
        pytest.param("doubler/latest", [[1, 10], [2]], 400, "InvalidInput: row 2 of 2 (id 2): ", id="M13"),
        pytest.param("doubler/latest", [[1, 2, 3]], 400, "InvalidInput: ", id="too many"),
        pytest.param("doubler/latest", [[1, 1], [2, -5]], 400, "ValueError: -5 is less than nothing", id="M15"),
        pytest.param("doubler/latest", -5, 400, "ValueError: -5 is less than nothing", id="single"),
        pytest.param("of_dict/latest", [[1, {"x": 1}]], 400, "KeyError: 'my_key'", id="KeyError"),
        pytest.param("doubler/latest", [[1, 2], 3], 400, "InvalidInput: row 2 must be a list", id="odd row"),
        pytest.param("doubler/latest", [[]], 400, "InvalidInput: row 1", id="no id"),
        pytest.param("odd/latest", [[1, "function"]], 400, "", id="module"),
        pytest.param("exits/latest", [[1, 3]], 422, "WorkerCrashed: ", id="os._exit"),
        pytest.param("nobody/latest", [[1, 3]], 404, "UnknownName: ", id="unknown deployment"),
        pytest.param("doubler/99", [[1, 3]], 404, "UnknownName: ", id="unknown version"),
        pytest.param("doubler/no/latest", [[1, 3]], 404, "UnknownName: ", id="unknown branch"),
    ],
)
async def test_errors(deployed, place, data, status, last):
    """What goes wrong with one row is an error of the whole request, whose last line says of what kind it is."""
    text = await deployed.error(place, data, status)
    assert text.split("\n")[-1].startswith(last), text


async def test_a_traceback_comes_before_its_last_line(deployed):
    """The text of an error of user code shows where it was raised, and which row it was."""
    text = await deployed.error("doubler/latest", [[1, 1], ["b", -5]], 400)
    assert "Traceback" in text and "app.py" in text and "row 2 of 2" in text and '"b"' in text


async def test_a_circle_is_no_result(deployed):
    """A result that holds itself is refused in Modelbit's words."""
    text = await deployed.error("odd/latest", [[1, "circle"]], 400)
    assert "Cannot serialize result: circular reference detected." in text


async def test_the_next_call_works(deployed):
    """After a worker was killed by its function the same deployment answers."""
    await deployed.error("exits/latest", [[1, 3]], 422)
    assert (await deployed.call("exits/latest", [[1, "x"]])).status_code == 400


async def test_rows_may_fail_alone(deployed):
    """With `row_errors` the rows that fail have their own errors, and the others their results."""
    data = [[1, 1], ["b", -5], [3, 3]]
    answered = await deployed.answer("doubler/latest", data, row_errors=True)
    assert answered == [[1, 2], ["b", None, {"error": "ValueError: -5 is less than nothing"}], [3, 6]]
    batched = await deployed.answer("many/latest", [[1, "a"], [2, "bad"], [3, "c"]], row_errors=True)
    assert batched == [[1, "a!"], [2, None, {"error": "KeyError: 'bad'"}], [3, "c!"]]


@pytest.mark.parametrize(
    "fields",
    [{"timeout": 1}, {"response_format": "csv"}, {"response_webhook": 1}, {"timeout_seconds": 0},
     {"timeout_seconds": "1"}, {"response_webhook_ignore_timeout": True}, {"response_webhook": "ftp://x.org/"}],
    ids=str,
)  # fmt: skip
async def test_fields_that_are_wrong(deployed, fields):
    """An unknown field, or a value that it cannot have, is refused by its name."""
    text = await deployed.error("doubler/latest", 1, 400, **fields)
    assert (next(iter(fields)) in text) or "URL" in text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"data"}', b"{}", b'{"data":' + b"[" * 5000])
async def test_bodies_that_are_none(deployed, body):
    """What is no such body is an error of this API, and the server goes on."""
    reply = await deployed.http.post("/v1/doubler/latest", content=body)
    assert reply.status_code == 400 and isinstance(reply.json()["error"], str), reply.text


async def test_a_call_that_takes_too_long(deployed):
    """M33: `timeout_seconds` ends a call, with an error that its client does not repeat."""
    began = time.monotonic()
    text = await deployed.error("slow/latest", [[1, 30]], 422, timeout_seconds=1)
    assert text.split("\n")[-1].startswith("TimeoutError: ")
    assert time.monotonic() - began < 6
    assert await deployed.answer("slow/latest", 0) == "done"


@pytest.mark.parametrize(
    "place", ["doubler/latest", "doubler/main/latest", "doubler/1", "doubler/main/1", "doubler/feat~x/latest"]
)
@pytest.mark.parametrize("prefix", ["", "/:5000"])
async def test_places(deployed, place, prefix):
    """M29: two and three words, with and without the prefix that the published client sends, a branch with a slash."""
    if "feat~x" in place and prefix == "":
        await deploy(deployed.running, "doubler", branch="feat/x")
    reply = await deployed.http.post(f"{prefix}/v1/{place}", content=b'{"data": 4}')
    assert (reply.status_code, reply.json()) == (200, {"data": 8})


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files/x", 405),
        ("/v1/batches/b/c", 404),
        ("/v1/uploads/u/nothing", 404),
        ("/v1/chat/nothing", 404),
        ("/v1/images/generations", 404),
    ],
)
async def test_names_of_other_apis(deployed, path, status):
    """A path that begins with a word of OpenAI's is answered in OpenAI's words."""
    reply = await deployed.http.post(path, json={"data": 1, "model": "nobody"})
    assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_paths_that_the_configuration_serves(deployed):
    """A function of the configuration goes on to answer any path of this shape, where the body names it."""
    reply = await deployed.http.post("/v1/some/path", json={"model": "double", "n": 4})
    assert reply.status_code == 200 and reply.json()["twice"] == 8
    reply = await deployed.http.post("/v1/some/longer/path", json={"model": "double", "n": -1})
    assert reply.json()["error"]["code"] == "function_error"
    reply = await deployed.http.post("/v1/some/path", json={"model": "triple", "n": 4})
    assert reply.status_code == 404 and isinstance(reply.json()["error"], str)


async def test_a_stream_is_heard_event_by_event(deployed):
    """A generator function answers with server-sent events, one for each value."""
    reply = await deployed.call("counting/latest", 3)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]
    assert events == [{"data": 0}, {"data": 1}, {"data": 2}]


async def test_a_batch_has_the_events_of_each_row(deployed):
    """Rows of a generator function are answered as other rows are, with a list of the row's values; so is a link."""
    assert await deployed.answer("counting/latest", [["a", 2], ["b", 0], ["c", 1]]) == [
        ["a", [0, 1]],
        ["b", []],
        ["c", [0]],
    ]
    link = await deployed.answer("counting/latest", 2, response_format="links")
    assert (await deployed.http.get(link)).json() == {"data": [0, 1]}


async def test_what_a_deployment_takes(deployed):
    """A GET shows arguments, a call to copy, and an OpenAPI document of the deployment alone."""
    reply = (await deployed.http.get("/v1/echo3/latest")).json()
    assert [(each["name"], each["type"]) for each in reply["arguments"]] == [("a", "int"), ("b", "str"), ("c", "float")]
    assert (reply["deployment"], reply["branch"], reply["version"]) == ("echo3", "main", 1)
    assert reply["curl"].startswith("curl -s -XPOST http://") and "/v1/echo3/latest -d" in reply["curl"]
    operation = reply["openapi"]["paths"]["/v1/echo3/latest"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    assert (await deployed.http.post(reply["url"], json=example)).status_code == 200
    assert (await deployed.http.get("/v1/nobody/latest")).status_code == 404


async def test_an_answer_behind_a_link(deployed):
    """`response_format` "links" leaves the answer at the server: whoever has the link fetches it, nobody else."""
    link = await deployed.answer("doubler/latest", [[1, 10]], response_format="links")
    assert ".json?" in link
    fetched = await deployed.http.get(link)
    assert (fetched.status_code, fetched.json()) == (200, {"data": [[1, 20]]})
    forged = link[:-2] + ("AA" if not link.endswith("AA") else "BB")
    for other in (forged, link.partition("?")[0], link.replace("file-", "file-0")):
        refused = await deployed.http.get(other)
        assert refused.status_code == 403 and "altered" in refused.json()["error"]
    assert (await deployed.call("doubler/latest", -1, response_format="links")).status_code == 400


async def test_a_compressed_body_is_refused(deployed):
    """A Content-Encoding is refused, not read as if it were none."""
    reply = await deployed.http.post("/v1/doubler/latest", content=b"x", headers={"content-encoding": "gzip"})
    assert reply.status_code == 415 and "Content-Encoding" in reply.json()["error"]

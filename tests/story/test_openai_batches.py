"""Batches, driven by the openai package as it is published, against a real server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_story import ended, lines, result_lines, row, submit, texts, until, write_project
from running_server import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai-batches")
    write_project(folder)
    with RunningServer(folder) as running:
        yield running


def test_from_a_file_to_its_results(client):
    """A batch goes from upload to output; every field says what happened, and results are in the file's order."""
    before = int(time.time())
    rows = [row(f"r{n}", f"text {n}") for n in range(50)]
    batch = submit(
        client, rows, metadata={"run": "nightly"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert batch.status in ("validating", "in_progress") and batch.id.startswith("batch_")
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/chat/completions", "24h")
    done = ended(client, batch)
    assert done.status == "completed" and done.request_counts
    assert done.request_counts.model_dump() == {"total": 50, "completed": 50, "failed": 0}
    assert done.metadata == {"run": "nightly"} and done.errors is None and done.error_file_id is None
    assert done.expires_at and 86399 <= done.expires_at - done.created_at <= 86400
    times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert None not in times and times == sorted(times) and before <= times[0]
    assert (done.failed_at, done.expired_at, done.cancelling_at, done.cancelled_at) == (None,) * 4
    assert done.usage and done.usage.total_tokens == sum(len(f"text {n}") for n in range(50)) + 50
    assert done.model == "chat"
    found = result_lines(client, done.output_file_id)
    assert [each["custom_id"] for each in found] == [f"r{n}" for n in range(50)]
    assert texts(found) == {f"r{n}": f"TEXT {n}" for n in range(50)}
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found)
    assert len({each["id"] for each in found}) == 50
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.expires_at == output.created_at + 3600


async def test_from_a_file_to_its_results_without_blocking(server):
    """The asynchronous client sees the same."""
    async with AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        file = await client.files.create(file=("a.jsonl", lines([row("a", "x")])), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        with OpenAI(api_key="none", base_url=f"{server.url}/v1") as looking:
            ended(looking, batch)
        done = await client.batches.retrieve(batch.id)
        assert done.status == "completed"
        content = await client.files.content(done.output_file_id)
        assert json.loads(content.text)["response"]["body"]["choices"][0]["message"]["content"] == "X"
        assert batch.id in [each.id async for each in client.batches.list(limit=1)]
        with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
            await client.batches.cancel(batch.id)


@pytest.mark.parametrize("window", ["1h", "24h", "168h", "8760h"])
def test_any_window_of_whole_hours(client, window):
    """A completion window of any number of hours up to a year is a deadline."""
    batch = submit(client, [row("a", "x")], completion_window=window)
    seconds = int(window[:-1]) * 3600
    assert batch.expires_at and seconds - 1 <= batch.expires_at - batch.created_at <= seconds
    assert ended(client, batch).status == "completed"


def test_several_models_in_one_file(client):
    """Each row goes to the model that it names, and a batch of several models names none."""
    rows = [row("a", "one"), row("b", "two", "org/named"), row("c", "three")]
    done = ended(client, submit(client, rows))
    found = result_lines(client, done.output_file_id)
    assert [(each["custom_id"], each["response"]["body"]["model"]) for each in found] == [
        ("a", "chat"), ("b", "org/named"), ("c", "chat"),
    ]  # fmt: skip
    assert done.model is None


def test_any_path_that_a_model_serves(client):
    """A function is asked under a path that OpenAI does not have, and under OpenAI's."""
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/classify", "body": {"model": "classify", "text": "a long one"}}
    ]
    done = ended(client, submit(client, rows, endpoint="/v1/classify"))
    assert result_lines(client, done.output_file_id)[0]["response"]["body"] == {"label": "long"}
    rows = [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "embed", "input": "abc"}}]
    done = ended(client, submit(client, rows, endpoint="/v1/embeddings"))
    assert result_lines(client, done.output_file_id)[0]["response"]["body"]["data"][0]["embedding"][0] == 1.0


def test_rows_that_fail_are_in_the_error_file(client):
    """Good rows in the output, failed ones in the error file, each exactly once."""
    done = ended(client, submit(client, [row("a", "x"), row("b", "fail"), row("c", "y")]))
    assert done.status == "completed" and done.request_counts
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert list(texts(result_lines(client, done.output_file_id))) == ["a", "c"]
    [failed] = result_lines(client, done.error_file_id)
    assert failed["custom_id"] == "b" and "told to fail" in json.dumps(failed)


def test_a_batch_whose_rows_all_failed_says_so(client):
    """Finished, but nothing succeeded: the count of failed rows and the error file, and no output."""
    done = ended(client, submit(client, [row(f"r{n}", "fail") for n in range(3)]))
    assert done.status == "completed" and done.request_counts
    assert done.request_counts.model_dump() == {"total": 3, "completed": 0, "failed": 3}
    assert done.output_file_id is None
    assert len(result_lines(client, done.error_file_id)) == 3


def test_where_files_lie_is_not_told(client, server):
    """No message of a refused or a failed batch says where its file lies on the server."""
    for data in (b"", b"\n\n", "{}".encode("utf-16"), b"PAR1" + bytes(64) + b"PAR1", b"not json\n"):
        try:
            reply = ended(client, submit(client, data)).to_json()
        except openai.APIStatusError as refused:
            reply = refused.response.text
        assert str(server.folder) not in reply


def test_what_validation_refuses_has_line_numbers(client):
    """A file with wrong lines fails before any row has run, and every wrong line is named."""
    good = lines([row("a", "x")])
    wrong = [
        b"not json\n",
        lines([row("a", "again")]),
        lines([row("c", "x", "nobody")]),
        lines([row("d", "x", url="/v1/embeddings")]),
        json.dumps(
            {"custom_id": "e", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
        ).encode()
        + b"\n",
    ]
    done = ended(client, submit(client, good + b"".join(wrong)))
    assert done.status == "failed" and done.failed_at and done.errors and done.errors.data
    assert [each.line for each in done.errors.data] == [2, 3, 4, 5, 6]
    assert all(each.code and each.message for each in done.errors.data)
    assert "nobody" in (done.errors.data[2].message or "")
    assert (done.output_file_id, done.error_file_id) == (None, None)
    [listed] = [each for each in client.batches.list(limit=100) if each.id == done.id]
    assert listed.errors == done.errors


def test_an_engine_that_cannot_start_fails_the_batch(client):
    """The batch says what the engine said last."""
    rows = [{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {"model": "broken", "x": 1}}]
    done = ended(client, submit(client, rows, endpoint="/v1/x"))
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "engine_failed"
    assert "no such weights: w.bin" in (done.errors.data[0].message or "")


def test_cancelling_keeps_what_is_finished(client, server):
    """Rows that have run stay in the output; the others are in the error file as cancelled."""
    rows = [row(f"r{n}", "x") for n in range(5)] + [row(f"g{n}", "gate-cancel", "gated") for n in range(5000)]
    batch = submit(client, rows)
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.request_counts.completed == 5)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    with contextlib.suppress(openai.ConflictError):  # it may have ended meanwhile
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    (server.folder / "gate-cancel").touch()
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at and done.request_counts
    kept, dropped = result_lines(client, done.output_file_id), result_lines(client, done.error_file_id)
    assert {f"r{n}" for n in range(5)} <= {each["custom_id"] for each in kept}
    assert sorted(each["custom_id"] for each in kept + dropped) == sorted(each["custom_id"] for each in rows)
    assert dropped and {each["error"]["code"] for each in dropped} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
        client.batches.cancel(batch.id)


def test_expiry_keeps_what_is_finished(client, server):
    """A batch that runs out of time keeps its finished rows; the others are in the error file as expired."""
    rows = [row(f"r{n}", "x") for n in range(5)] + [row(f"g{n}", "gate-expire", "gated") for n in range(5000)]
    batch = submit(client, rows)
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.request_counts.completed == 5)
    job = f"{server.url}/batchmill/v1/jobs/{batch.id.replace('batch_', 'job_')}"
    assert httpx2.patch(job, json={"deadline": time.time() + 2}).status_code == 200
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.status != "in_progress")
    (server.folder / "gate-expire").touch()
    done = ended(client, batch)
    assert done.status == "expired" and done.expired_at and done.finalizing_at and done.cancelled_at is None
    kept, dropped = result_lines(client, done.output_file_id), result_lines(client, done.error_file_id)
    assert sorted(each["custom_id"] for each in kept + dropped) == sorted(each["custom_id"] for each in rows)
    assert dropped[0]["response"] is None and dropped[0]["error"] == {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }


def test_pages(client):
    """The client's own paging walks through every batch once, the newest first."""
    made = [ended(client, submit(client, [row("a", "x")])).id for _ in range(5)]
    walked = [each.id for each in client.batches.list(limit=2)]
    assert walked[:5] == made[::-1] and len(walked) == len(set(walked))
    page = client.batches.list(limit=2)
    assert page.has_more and [each.id for each in page.data] == made[:2:-1]
    assert [each.id for each in client.batches.list(limit=2, after=made[3]).data] == made[2:0:-1]
    oldest = client.batches.list(limit=100, after=walked[-2])
    assert [each.id for each in oldest.data] == [walked[-1]] and not oldest.has_more


def test_a_file_under_a_running_batch_stays(client, server):
    """An input file is not deleted while its batch runs, and can be afterwards."""
    batch = submit(client, [row("a", "gate-file", "gated")])
    with pytest.raises(openai.ConflictError) as refused:
        client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    (server.folder / "gate-file").touch()
    done = ended(client, batch)
    assert client.files.delete(done.input_file_id).deleted
    assert result_lines(client, done.output_file_id)


BAD_FIELDS = [
    ({"completion_window": "0h"}, "completion_window", "invalid_completion_window"),
    ({"completion_window": "-1d"}, "completion_window", "invalid_completion_window"),
    ({"completion_window": "9999999d"}, "completion_window", "invalid_completion_window"),
    ({"completion_window": "8761h"}, "completion_window", "invalid_completion_window"),
    ({"completion_window": "24"}, "completion_window", "invalid_completion_window"),
    ({"endpoint": "/v2/chat"}, "endpoint", "invalid_endpoint"),
    ({"endpoint": ""}, "endpoint", "invalid_endpoint"),
    ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
    ({"metadata": {"k": 1}}, "metadata", "invalid_value"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after", "invalid_value"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after", "invalid_value"),
    ({"extra_body": {"complete_window": "1h"}}, "complete_window", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_wrong_fields_are_named(client, fields, param, code):
    """What cannot be is refused in OpenAI's form with the parameter's name, and leaves no batch behind."""
    count = len(list(client.batches.list(limit=100)))
    with pytest.raises(openai.BadRequestError) as refused:
        submit(client, [row("a", "x")], **fields)
    assert refused.value.type == "invalid_request_error" and refused.value.code == code
    assert str(refused.value.param).startswith(param)
    assert len(list(client.batches.list(limit=100))) == count


@pytest.mark.parametrize("fields", [{"metadata": {f"{n:064}": "v" * 512 for n in range(16)}}, {"metadata": {}}])
def test_metadata_of_every_allowed_size(client, fields):
    """16 pairs of 64 and 512 characters come back as they went in."""
    done = ended(client, submit(client, [row("a", "x")], **fields))
    assert done.metadata == (fields["metadata"] or None)


def test_wrong_files_are_named(client):
    """A file that is missing, was deleted, or is not a batch input makes no batch."""
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    deleted = client.files.create(file=("a.jsonl", lines([row("a", "x")])), purpose="batch").id
    client.files.delete(deleted)
    for file_id in ("file-nobody", deleted, "../../etc/passwd", "f" * 5000, ""):
        with pytest.raises(openai.NotFoundError) as unknown:
            client.batches.create(input_file_id=file_id, **body)
        assert (unknown.value.type, unknown.value.param) == ("invalid_request_error", "input_file_id")
        assert "No such File object" in unknown.value.message
    other = client.files.create(file=("a.jsonl", lines([row("a", "x")])), purpose="user_data").id
    with pytest.raises(openai.BadRequestError) as wrong:
        client.batches.create(input_file_id=other, **body)
    assert (wrong.value.code, wrong.value.param) == ("wrong_purpose", "input_file_id")


def test_batches_nobody_knows(client):
    """An id that is none, and one of another kind, are unknown in the same words."""
    for batch_id in ("batch_0123456789abcdef0123", "batch_", "job_0123456789abcdef0123", "x" * 2000, "..%2f..", "%00"):
        for ask in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch_id)
    with pytest.raises(openai.NotFoundError, match="No batch found with id 'batch_x'"):
        client.batches.list(after="batch_x")


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "limit=1&limit=2", "order=asc", "after"])
def test_wrong_queries_are_refused(server, query):
    """A query parameter that is unknown, repeated or out of range is an error, not a guess."""
    reply = httpx2.get(f"{server.url}/v1/batches?{query}")
    assert reply.status_code in (400, 404) and reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "media", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"a=b", "application/x-www-form-urlencoded", 415),
    ],
)
def test_wrong_bodies_are_refused(server, body, media, status):
    """A body that is not JSON object of this request is refused in OpenAI's form."""
    reply = httpx2.post(f"{server.url}/v1/batches", content=body, headers={"content-type": media})
    assert reply.status_code == status, reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def new_key(folder, project: str, *flags: str) -> str:
    words = [sys.executable, "-m", "batchmill", "--json", "--data-dir", str(folder / "data"), "keys", "create"]
    words += ["--name", project, "--project", project, *flags]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout.splitlines()[-1])["key"]


def test_projects_see_their_own(tmp_path):
    """Another project's file and batch are unknown in the words of one that never was; models are the key's own."""
    write_project(tmp_path)
    ann, bob = (new_key(tmp_path, name, "--scope", "submit") for name in ("ann", "bob"))
    chat_only = new_key(tmp_path, "ann", "--scope", "submit", "--model", "chat")
    with RunningServer(tmp_path) as server:
        clients = [OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0) for key in (ann, bob, chat_only)]
        of_ann, of_bob, narrow = clients
        done = ended(of_ann, submit(of_ann, [row("a", "x")]))
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        said = set()
        for file_id in (done.input_file_id, done.output_file_id, "file-0123456789abcdef01234567"):
            with pytest.raises(openai.NotFoundError) as unknown:
                of_bob.batches.create(input_file_id=file_id, **body)
            said.add(unknown.value.message.replace(file_id, "ID"))
        assert len(said) == 1
        for ask in (of_bob.batches.retrieve, of_bob.batches.cancel):
            with pytest.raises(openai.NotFoundError, match=f"No batch found with id '{done.id}'"):
                ask(done.id)
        with pytest.raises(openai.NotFoundError):
            of_bob.batches.list(after=done.id)
        assert list(of_bob.batches.list()) == [] and [each.id for each in of_ann.batches.list()] == [done.id]
        assert [each.id for each in narrow.models.list()] == ["chat"]
        refused = ended(narrow, submit(narrow, [row("a", "x"), row("b", "x", "gated")]))
        assert refused.status == "failed" and refused.errors and refused.errors.data
        assert [each.line for each in refused.errors.data] == [2]
        with pytest.raises(openai.NotFoundError):
            narrow.chat.completions.create(model="gated", messages=[{"role": "user", "content": "x"}])
        with OpenAI(api_key="bm_wrong", base_url=f"{server.url}/v1", max_retries=0) as nobody:
            with pytest.raises(openai.AuthenticationError) as unknown_key:
                nobody.batches.list()
            assert unknown_key.value.code == "invalid_api_key"
        for client in clients:
            client.close()

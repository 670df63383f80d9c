"""Batch inference over HTTP: jobs over datasets, what they say of themselves, and their results."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from dialects.predibase.llm_server import open_llms
from dialects.predibase.predibase_kit import EMPTY, MISSING_ID, Predibase, lines, row
from fakes.lora_files import write_lora

from batchmill.jobs.pools import dispatcher as dispatching

MORE = """
[projects.poor]
models = []
"""
TOKEN = "hf_not_a_real_one"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory):
    async with open_llms(tmp_path_factory.mktemp("batches"), MORE) as opened:
        for name in ("upper", "reverse"):
            write_lora(opened[2].folder / "adapters" / name, r=16)
        yield opened


@pytest.fixture(scope="module")
def predibase(opened):
    return Predibase(opened[1])


@pytest.fixture
def impatient(monkeypatch):
    """Rows that hang get no time to end when their job is cancelled."""
    monkeypatch.setattr(dispatching, "RELEASE_S", 0.01)


pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked(number: int, text: str, model: str = "") -> dict[str, Any]:
    return row(number, model=model, messages=[{"role": "user", "content": text}])


def refused(reply: httpx2.Response, status: int, *words: str) -> None:
    assert reply.status_code == status, reply.text
    for word in words:
        assert word in reply.json()["error"], reply.text


async def run(predibase: Predibase, name: str, content: bytes, **config: Any) -> dict[str, Any]:
    """A job that is over."""
    assert (await predibase.upload(content, name))["status"] == "connected"
    created = await predibase.create(name, **{"baseModel": "tiny", **config})
    assert created.status_code == 201, created.text
    return await predibase.until_over(created.json()["uuid"])


async def results(predibase: Predibase, job: str) -> list[dict[str, Any]]:
    link = await predibase.http.get(f"/v2/batch-inference/{job}/results")
    assert link.status_code == 200, link.text
    return [json.loads(line) for line in (await predibase.http.get(link.json()["url"])).text.splitlines()]


async def test_rows_of_a_base_model_and_its_adapters(predibase):
    """Each row is answered by whom it names, in the order of the input, in the form of the documentation."""
    content = lines(
        asked(1, "hello"), asked(2, "hello", "upper"), asked(3, "hello", "reverse"), asked(4, "ab", "upper")
    )
    job = await run(predibase, "mixed", content)
    assert (job["status"], job["error"]) == ("completed", None)
    assert job["rows"] == {"total": 4, "succeeded": 4, "failed": 0} and job["progress"] == 1.0
    assert job["resultPath"].startswith("/v2/batch-inference/")
    assert job["pricePerMillion"] == {"input": 0.5, "cached": 0.5, "output": 0.5} and job["cost"] > 0
    found = await results(predibase, job["uuid"])
    assert [each["custom_id"] for each in found] == ["row-1", "row-2", "row-3", "row-4"]
    said = [each["response"]["body"]["choices"][0]["message"]["content"] for each in found]
    assert said == ["hello", "HELLO", "olleh", "AB"]
    assert all(each["error"] is None and each["response"]["status_code"] == 200 for each in found)


async def test_rows_that_fail_stand_among_the_others(predibase):
    """One file holds every row, in the order of the input: what failed has its error, and no answer of the model."""
    job = await run(predibase, "partly", lines(asked(1, "a"), asked(2, "too-long b"), asked(3, "c")))
    assert (job["status"], job["rows"]) == ("completed", {"total": 3, "succeeded": 2, "failed": 1})
    first, second, third = await results(predibase, job["uuid"])
    assert [each["custom_id"] for each in (first, second, third)] == ["row-1", "row-2", "row-3"]
    assert first["error"] is None and third["error"] is None
    assert second["response"]["status_code"] == 400 and "choices" not in second["response"]["body"]


async def test_a_job_as_the_client_reads_it(predibase):
    """The order is shown as it was sent, without its token; the list has the newest first, as many as are asked for."""
    await predibase.upload(lines(asked(1, "a")), "shown")
    created = (await predibase.create("file_uploads/shown", baseModel="tiny", hfToken=TOKEN)).json()
    assert created["originalRequest"]["dataset"] == "file_uploads/shown"
    assert created["originalRequest"]["serverConfig"] == {**EMPTY, "baseModel": "tiny", "hfToken": "***"}
    assert created["status"] in ("queued", "running")
    dataset = (await predibase.get("shown")).json()["uuid"]
    by_id = (await predibase.create(dataset, baseModel="tiny")).json()
    for job in (created, by_id):
        reply = await predibase.until_over(job["uuid"])
        assert reply["status"] == "completed" and TOKEN not in json.dumps(reply)
        assert {"uuid", "originalRequest", "status", "error", "resultPath"} <= set(reply)
    page = (await predibase.http.get("/v2/batch-inference?limit=2")).json()["data"]["jobs"]
    assert [each["uuid"] for each in page] == [by_id["uuid"], created["uuid"]]


async def test_an_order_whose_reply_was_lost(predibase):
    """The client repeats its POST blindly: with a key of its own it is the same job for ever."""
    await predibase.upload(lines(asked(1, "a")), "again")
    body, key = {"dataset": "again", "serverConfig": {**EMPTY, "baseModel": "tiny"}}, {"idempotency-key": "k-1"}
    reply = [await predibase.http.post("/v2/batch-inference", json=body, headers=key) for _ in range(3)]
    assert [each.status_code for each in reply] == [201, 201, 201]
    assert len({each.json()["uuid"] for each in reply}) == 1


async def test_a_job_that_is_cancelled(predibase, impatient):
    """Asked twice it is one cancellation; what had been answered can be downloaded, each row in its place."""
    await predibase.upload(lines(asked(1, "a"), asked(2, "hangs")), "stopped")
    job = (await predibase.create("stopped", baseModel="tiny")).json()["uuid"]
    link = await predibase.http.get(f"/v2/batch-inference/{job}/results")
    refused(link, 409, "its results can be downloaded once it is completed")
    for _ in range(2):
        assert (await predibase.http.post(f"/v2/batch-inference/{job}/cancel")).status_code == 204
    reply = await predibase.until_over(job)
    assert (reply["status"], reply["error"]) == ("cancelled", None)
    assert (await predibase.http.post(f"/v2/batch-inference/{job}/cancel")).status_code == 204


async def test_a_job_that_has_ended_cannot_be_cancelled(predibase):
    job = await run(predibase, "ended", lines(asked(1, "a")))
    refused(await predibase.http.post(f"/v2/batch-inference/{job['uuid']}/cancel"), 409, "is completed")


async def test_a_result_link_works_once(predibase):
    """Each look gives a fresh link; one that was used, and one that was altered, are refused."""
    job = await run(predibase, "linked", lines(asked(1, "a")))
    place = f"/v2/batch-inference/{job['uuid']}/results"
    first, second = [(await predibase.http.get(place)).json()["url"] for _ in range(2)]
    assert first != second and first.startswith("http://127.0.0.1:")
    assert (await predibase.http.get(first)).status_code == 200
    refused(await predibase.http.get(first), 410, "has been used")
    refused(await predibase.http.get(second[:-1] + ("A" if second[-1] != "A" else "B")), 403, "altered")
    assert (await predibase.http.get(second)).status_code == 200


async def test_what_a_row_asks_for_is_its_own(predibase):
    """A line that is a request with an id is taken; what it asks for and cannot have fails it alone, in its place."""
    wrong = [
        (asked(2, "a", "nobody/7"), "unknown_model"),
        (row(3, messages=[]), "invalid_field"),
        (row(4, messages="a"), "invalid_field"),
        ({**asked(5, "a"), "url": "/v1/fine_tuning"}, "invalid_url"),
        (row(6, model=7, messages=[{"role": "user", "content": "a"}]), "invalid_field"),
        (asked(7, "a") | {"body": asked(7, "a")["body"] | {"adapter_id": "x"}}, "parameter_not_allowed"),
        (asked(8, "a") | {"body": asked(8, "a")["body"] | {"temprature": 1}}, "unknown_parameter"),
    ]
    content = lines(asked(1, "a"), *(each for each, _ in wrong), asked(9, "b"))
    job = await run(predibase, "own", content)
    assert (job["status"], job["error"]) == ("completed", None)
    assert job["rows"] == {"total": 9, "succeeded": 2, "failed": 7}
    found = await results(predibase, job["uuid"])
    assert [each["custom_id"] for each in found] == [f"row-{n}" for n in range(1, 10)]
    assert found[0]["error"] is None and found[-1]["error"] is None
    result = [each["error"]["code"] for each in found[1:-1]]
    assert result == [code for _, code in wrong]


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        ({"baseModel": "nobody"}, 404, ["nobody"]),
        ({"baseModel": "tiny", "loraxImageTag": "main"}, 400, ["loraxImageTag"]),
        ({"baseModel": "tiny", "quantization": "eetq"}, 400, ["eetq"]),
        ({"baseModel": "tiny", "backend": "v2"}, 400, ["backend"]),
        ({"baseModel": "tiny", "customArgs": ["--trust-remote-code"]}, 400, ["trust-remote-code"]),
        ({"baseModel": "tiny", "speed": "high"}, 400, ["speed"]),
    ],
)
async def test_settings_that_cannot_be(predibase, config, status, words):
    """What an engine here has no use for is refused by its name, never ignored."""
    await predibase.upload(lines(asked(1, "a")), "settings")
    refused(await predibase.create("settings", **config), status, *words)


async def test_datasets_that_cannot_be_run(predibase):
    """A failed dataset, a table, and one that is not there, each with what to do."""
    await predibase.upload(b"prompt,completion\na,b\n", "table", "table.csv")
    refused(await predibase.create("table", baseModel="tiny"), 400, "'table'", "csv", "custom_id")
    await predibase.upload(lines(asked(1, "a"), asked(1, "b")), "failed")
    refused(await predibase.create("failed", baseModel="tiny"), 400, "'failed'", "line 2")
    refused(await predibase.create("nobody", baseModel="tiny"), 404, "'nobody'")
    refused(await predibase.create("warehouse/rows", baseModel="tiny"), 404, "'warehouse'")
    for method, place in (("GET", ""), ("GET", "/results"), ("POST", "/cancel")):
        refused(await predibase.http.request(method, f"/v2/batch-inference/{MISSING_ID}{place}"), 404, MISSING_ID)


async def test_a_dataset_that_a_job_reads_stays(predibase, impatient):
    """It is deleted once the job has ended."""
    reply = await predibase.upload(lines(asked(1, "hangs")), "read")
    job = (await predibase.create("read", baseModel="tiny")).json()["uuid"]
    refused(await predibase.http.delete(f"/v2/datasets/{reply['uuid']}"), 409, "in use")
    await predibase.http.post(f"/v2/batch-inference/{job}/cancel")
    await predibase.until_over(job)
    assert (await predibase.http.delete(f"/v2/datasets/{reply['uuid']}")).status_code == 204

"""The parts of the provider_batch engine: drafts and their limits, the spool, OpenAI's lines, Azure, access."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from engines.provider_batch_support import FAST, Ground, HeldLease, batch_model, batch_row
from fakes.batch_provider import BatchProvider

from batchmill.engines.connections import Connections
from batchmill.engines.provider_batch.engine import ProviderBatchEngine, sweep
from batchmill.engines.provider_batch.openai import AzureBatches, OpenAIBatches, read_line
from batchmill.engines.provider_batch.provider import BatchLimits, ProviderRow
from batchmill.engines.provider_batch.settings import Access, read_settings
from batchmill.engines.provider_batch.spool import Drafts, Spool
from batchmill.errors import InvalidRow, ModelFailed
from batchmill.types import Limits, ModelSpec, Request
from batchmill.types.connectors import BATCH_PREDICT, Action, Connector

# -- the spool --------------------------------------------------------------------------------------------------------


def test_spool(tmp_path: Path) -> None:
    """Rows come back with their bytes in the order they are asked for, and one that was taken is gone."""
    spool = Spool(tmp_path)
    rows = [batch_row(number) for number in range(50)]
    raws = {row.position: row.raw for row in rows}
    spool.add(rows[:20])
    spool.add(rows[20:])
    assert all(row.raw == b"" for row in rows)
    asked = [130, 101, 149, 100]
    assert [row.raw for row in spool.read(asked)] == [raws[position] for position in asked]
    spool.release(rows)
    assert [row.position for row in spool.take([110])] == [110]
    assert len(spool) == 49 and 110 not in spool and 111 in spool
    spool.close()


def test_spool_reads_far_apart(tmp_path: Path) -> None:
    """Rows that lie far apart are read one by one, not with everything between them."""
    spool = Spool(tmp_path)
    rows = [batch_row(number, text="x" * 50_000) for number in range(60)]
    raws = {row.position: row.raw for row in rows}
    spool.add(rows)
    assert [row.raw for row in spool.read([100, 159])] == [raws[100], raws[159]]
    spool.close()


# -- drafts -----------------------------------------------------------------------------------------------------------


def drafted(
    folder: Path, limits: BatchLimits, lines: list[tuple[int, ProviderRow]]
) -> list[tuple[str, list[tuple[int, int]]]]:
    drafts = Drafts(folder, "d", limits)
    for number, line in lines:
        drafts.add(number, line)
    return [(draft.upload.path.read_text(), draft.runs) for draft in drafts.finish()]


def test_draft_at_its_rows(tmp_path: Path) -> None:
    """A draft takes as many rows as the provider does, and the next row begins another."""
    limits = BatchLimits(3, 1000, 1.0)
    lines = [(number, ProviderRow(b"%d" % number)) for number in range(4)]
    assert drafted(tmp_path, limits, lines) == [("0\n1\n2\n", [(0, 3)]), ("3\n", [(3, 1)])]


def test_draft_at_its_bytes(tmp_path: Path) -> None:
    """A draft is filled to the last byte that the provider takes, and no further."""
    lines = [(number, ProviderRow(b"abc")) for number in range(4)]
    whole = len(b"[abc,abc,abc]") + 1
    limits = BatchLimits(100, whole, 1.0, head=b"[", between=b",", tail=b"]")
    assert [text for text, _ in drafted(tmp_path, limits, lines)] == ["[abc,abc,abc]", "[abc]"]
    limits = msgspec.structs.replace(limits, bytes_max=whole - 1)
    assert [text for text, _ in drafted(tmp_path, limits, lines)] == ["[abc,abc]", "[abc,abc]"]


def test_draft_at_its_inputs(tmp_path: Path) -> None:
    """Inputs of embeddings are counted over a draft's rows."""
    limits = BatchLimits(100, 1000, 1.0, inputs_max=5)
    lines = [(number, ProviderRow(b"a", "", 2)) for number in range(3)]
    assert [runs for _, runs in drafted(tmp_path, limits, lines)] == [[(0, 2)], [(2, 1)]]


@pytest.mark.parametrize("line", [ProviderRow(b"x" * 99), ProviderRow(b"x", "", 6)])
def test_draft_refuses_a_row(tmp_path: Path, line: ProviderRow) -> None:
    """A row that is larger than any job may be is refused, and says so."""
    with pytest.raises(InvalidRow) as raised:
        Drafts(tmp_path, "d", BatchLimits(100, 100, 1.0, inputs_max=5)).add(0, line)
    assert raised.value.code == "row_too_large"


def test_draft_groups_and_gaps(tmp_path: Path) -> None:
    """Rows of two groups go in two files, and runs say which rows each holds."""
    limits = BatchLimits(100, 1000, 1.0)
    lines = [
        (1, ProviderRow(b"a", "A")),
        (2, ProviderRow(b"b", "B")),
        (3, ProviderRow(b"c", "A")),
        (4, ProviderRow(b"d", "A")),
        (9, ProviderRow(b"e", "A")),
    ]
    assert drafted(tmp_path, limits, lines) == [("a\nc\nd\ne\n", [(1, 1), (3, 2), (9, 1)]), ("b\n", [(2, 1)])]


# -- rows and lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"model":"","a":1}', {"model": "remote-m", "a": 1}),
        (b'{"a":1}', {"model": "remote-m", "a": 1}),
        (b'{"a":1,"model":""}', {"model": "remote-m", "a": 1}),
        (b'{"a":{"model":"inner"}}', {"model": "remote-m", "a": {"model": "inner"}}),
        (b'{"model":"","a":"\\"model\\""}', {"model": "remote-m", "a": '"model"'}),
        (b'{"mod\\u0065l":null,"a":1}', {"model": "remote-m", "a": 1}),
        (b'{"model":"m"}', {"model": "remote-m"}),
        (b'{"model":"other"}', {"model": "other"}),
        (b"{}", {"model": "remote-m"}),
        (b"{ }", {"model": "remote-m"}),
    ],
)
def test_encode_names_the_model(body: bytes, sent: dict[str, object]) -> None:
    """A row goes out under the provider's name for its model, and with nothing else changed."""
    api = OpenAIBatches(batch_model("http://127.0.0.1:1/v1"), Connections(Limits()))
    line = json.loads(api.encode(7, Request("/v1/chat/completions", body)).data, object_pairs_hook=no_twins)
    assert line["body"] == sent
    assert (line["custom_id"], line["method"], line["url"]) == ("r7", "POST", "/v1/chat/completions")


def no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len({name for name, _ in pairs}) == len(pairs), f"a member is there twice: {pairs}"
    return dict(pairs)


@pytest.mark.parametrize(
    ("value", "inputs"),
    [('"text"', 1), ('["a","b"]', 2), ("[1,2,3]", 1), ("[[1,2],[3]]", 2), ("[]", 1)],
)
def test_inputs_are_counted(value: str, inputs: int) -> None:
    """Texts count one by one; a list of numbers is one text, of tokens."""
    api = OpenAIBatches(batch_model("http://127.0.0.1:1/v1"), Connections(Limits()))
    assert api.encode(0, Request("/v1/embeddings", b'{"input":%b}' % value.encode())).inputs == inputs


def line_of(**members: object) -> bytes:
    return json.dumps({"id": "x", "custom_id": "r5", "response": None, "error": None, **members}).encode()


@pytest.mark.parametrize(
    ("line", "number", "status", "code", "kind"),
    [
        (line_of(response={"status_code": 200, "body": {"a": 1}}), 5, 200, None, ""),
        (line_of(response={"status_code": 429, "body": {"error": {"code": "slow"}}}), 5, 429, "slow", "undone"),
        (line_of(response={"status_code": 400, "body": {"error": {"code": "bad"}}}), 5, 400, "bad", ""),
        (line_of(response={"status_code": 200, "body": {"error": {"code": "bad"}}}), 5, 500, "bad", ""),
        (line_of(response={"status_code": 200, "body": "text"}), 5, 0, "bad_response", ""),
        (line_of(error={"code": "batch_expired", "message": "m"}), 5, 0, "batch_expired", "undone"),
        (line_of(error={"code": "batch_cancelled"}), 5, 0, "batch_cancelled", "undone"),
        (line_of(error={"code": None, "message": None}), 5, 0, "provider_error", ""),
        (line_of(), 5, 0, "bad_response", "garbled"),
        (line_of(custom_id="other", response={"status_code": 200, "body": {}}), -1, 200, None, ""),
        (line_of(response={"status_code": 200, "body": {}})[:-9], 5, 0, "bad_response", "garbled"),
        (b"<html>", -1, 0, "bad_response", "garbled"),
    ],
)
def test_lines(line: bytes, number: int, status: int, code: str | None, kind: str) -> None:
    """Each line of a result file is the reply it says, and what is none is told from what may be read again."""
    found, reply = read_line(line)
    assert (found, reply.status, reply.error and reply.error.code) == (number, status, code)
    assert (reply.is_undone, reply.is_garbled) == (kind == "undone", kind == "garbled")


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["poll_s", "stuck_after_s", "jobs_max", "tries_max"])
@pytest.mark.parametrize("value", ["soon", 0, -1, True])
def test_settings_are_checked(name: str, value: str | int | bool) -> None:
    """A setting that is not a number of its kind is refused by its name."""
    model = msgspec.structs.replace(batch_model("http://127.0.0.1:1"), engine_args={name: value})
    with pytest.raises(ModelFailed, match=name):
        read_settings(model, frozenset())


def test_unknown_arguments(tmp_path: Path) -> None:
    """An argument that nobody knows is refused, and those there are are named."""
    model = msgspec.structs.replace(batch_model("http://127.0.0.1:1"), engine_args={"pool_s": 1})
    with pytest.raises(ModelFailed, match=r"pool_s.*poll_s"):
        ProviderBatchEngine(model, tmp_path)


def test_what_a_dead_worker_left(tmp_path: Path) -> None:
    """Folders of processes that are no more are removed; others stay."""
    (tmp_path / "provider-batch-999999999-x").mkdir()
    (tmp_path / "provider-batch-1-x").mkdir()
    (tmp_path / "other").mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "provider-batch-1-x"]


# -- access -----------------------------------------------------------------------------------------------------------


def test_default_key_goes_to_its_owner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's key is sent to OpenAI alone, unless the model names it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    openai = ModelSpec("m", "provider_batch", "m", provider="openai")
    assert Access(openai).headers() == {"Authorization": "Bearer sk-own"}
    elsewhere = msgspec.structs.replace(openai, base_url="https://example.com/v1")
    assert Access(elsewhere).headers() == {}
    named = msgspec.structs.replace(elsewhere, api_key="env:OPENAI_API_KEY", engine_args={"header.X-Team": "a"})
    assert Access(named).headers() == {"Authorization": "Bearer sk-own", "X-Team": "a"}


def test_access_through_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector's batch_predict says where the API is and what opens it."""
    monkeypatch.setenv("BATCH_KEY", "sk-1")
    action = Action(
        BATCH_PREDICT,
        "POST",
        "https://${parameters.host}/v1/batches",
        {"Authorization": "Bearer ${credential.key}", "Content-Type": "application/json"},
        '{"input_file_id":"${parameters.input_file_id}"}',
    )
    connector = Connector(
        "c1", "c", "1", "http", [action], parameters={"host": "example.com"}, credential={"key": "env:BATCH_KEY"}
    )
    access = Access(ModelSpec("m", "provider_batch", "m", provider="openai", connector=connector))
    assert access.base_url == "https://example.com/v1"
    assert access.headers() == {"Authorization": "Bearer sk-1"}
    assert access.secrets == [b"sk-1"]


# -- Azure ------------------------------------------------------------------------------------------------------------


class AzureDoor:
    """What Azure's calls carry, seen on their way to the fake provider."""

    def __init__(self) -> None:
        self.versions: set[str] = set()
        self.keys: set[str] = set()

    @web.middleware
    async def middleware(self, request: web.Request, handler: object) -> web.StreamResponse:
        self.versions.add(request.query.get("api-version", ""))
        self.keys.add(request.headers.get("api-key", ""))
        return await handler(request)  # type: ignore[operator]


@pytest.fixture
async def azure() -> AsyncIterator[tuple[BatchProvider, AzureDoor]]:
    provider = BatchProvider()
    frontend = AzureDoor()
    provider.prefix, provider.middlewares = "/openai", [frontend.middleware]
    provider.file_states = ["pending", "running"]
    async with provider:
        yield provider, frontend


async def test_azure_by_deployment(
    azure: tuple[BatchProvider, AzureDoor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure's older API is called with its version, its key and its own paths, once it has read the file."""
    provider, frontend = azure
    monkeypatch.setenv("AZURE_KEY", "az-1")
    model = ModelSpec(
        "m",
        "provider_batch",
        "deployment",
        base_url=f"http://127.0.0.1:{provider.port}/openai",
        api_key="env:AZURE_KEY",
        provider="azure",
        engine_args=FAST | {"api_version": "2024-10-21"},
    )
    ground = Ground(model, tmp_path)
    await ground.run((HeldLease(4), [batch_row(number) for number in range(4)]))
    assert sorted(ground.outcomes()) == [0, 1, 2, 3]
    assert frontend.versions == {"2024-10-21"} and frontend.keys == {"az-1"}
    (batch,) = provider.batches.values()
    assert (batch.endpoint, batch.lines[0]["url"]) == ("/chat/completions", "/chat/completions")
    assert batch.lines[0]["body"]["model"] == "deployment"


def test_azure_v1() -> None:
    """Azure's v1 API has OpenAI's own paths."""
    model = ModelSpec("m", "provider_batch", "d", base_url="https://n.openai.azure.com/openai/v1", provider="azure")
    api = AzureBatches(model, Connections(Limits()))
    assert json.loads(api.encode(1, Request("/v1/chat/completions", b"{}")).data)["url"] == "/v1/chat/completions"

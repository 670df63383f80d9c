"""The LLM engine over the real vLLM, with the small model of this repository."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from contract.engine_suite import answer_to, chat_request
from llm_support import ListFeed, ListSink, body_row, chat_row

from batchmill.engines.llm import guard
from batchmill.engines.llm.engine import LlmEngine
from batchmill.errors import ModelFailed
from batchmill.types import Limits, LiveRequest, ModelSpec, OutputSchema
from batchmill.wire.rows.forms import OpenAIForm
from batchmill.wire.schemas.output_schema import schema_of_fields
from batchmill.wire.schemas.schema_validation import validator_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
PYTHON = Path(__file__).parents[1] / "fakes" / "forking_vllm" / "python.sh"
ENV = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


NO_BLANKS = '{"backend":"xgrammar","disable_any_whitespace":true}'  # of JSON: small models write them without end
POISON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 10**9}}}


KINDS = {f"{('upper', 'reverse')[n % 2]}/{n}": ("upper", "reverse")[n % 2] for n in range(8)}  # of adapters


def tiny(**fields):
    fields = {"name": "tiny", "engine": "llm", "source": str(TINY), "engine_args": {"max-model-len": 2048}, **fields}
    return ModelSpec(**fields, python=str(PYTHON))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Ten adapters that answer, and one whose weights are no tensors."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = {"upper": "upper", "reverse": "reverse", **KINDS, "bad": "upper"}
    places = {
        name: shutil.copytree(TINY / "adapters" / kind, folder / str(n)) for n, (name, kind) in enumerate(kinds.items())
    }
    (places["bad"] / "adapter_model.safetensors").write_bytes(b"no tensors")
    return {name: str(place) for name, place in places.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory, adapters):
    """One vLLM, which takes long to start, with more adapters than places."""
    engine_args = {"max-model-len": 2048, "structured-outputs-config": NO_BLANKS}
    model = tiny(adapters=adapters, adapter_rank=16, limits=Limits(adapters_max=2), engine_args=engine_args)
    made = LlmEngine(model, tmp_path_factory.mktemp("engine"), env=ENV)
    await made.start()
    yield made
    await made.stop()


async def run(engine, rows):
    sink = ListSink()
    await engine.run(ListFeed(rows), sink)
    return sink


def marker_and_server(engine):
    record = json.loads(engine.server.process.pid_file.read_text())
    return record["marker"], record["server_pid"]


async def test_more_adapters_than_places(engine, adapters):
    """Base rows between rows of eight adapters in two places: every answer is right, and a bad adapter fails alone."""
    said = {"upper": "RED BLUE", "reverse": "eulb der", "": "red blue"}
    names = ["", *KINDS, "bad"]
    models = [names[n // 4 % len(names)] if n % 3 else "" for n in range(80)]
    running = asyncio.create_task(
        run(
            engine,
            [chat_row(n, "Say: red blue", model=m, temperature=0, max_tokens=24) for n, m in enumerate(models)],
        )
    )
    live = [
        LiveRequest("/v1/chat/completions", request.body, adapter=name, adapter_place=adapters[name])
        for name in ("reverse/7", "upper/0")
        for request in [chat_request("Say: red blue", model=name, temperature=0, max_tokens=24)]
    ]
    answers = [json.loads((await answer_to(engine, request))[1]) for request in live]
    assert [each["choices"][0]["message"]["content"] for each in answers] == ["eulb der", "RED BLUE"]
    sink = await running
    for n, model in enumerate(models):
        if model == "bad":
            assert sink.code(n) == "bad_adapter"
        else:
            assert (n, sink.text(n)) == (n, said[KINDS.get(model, "")])
    assert json.loads(sink.outcomes[models.index("upper/0")].body)["model"] == "upper/0"
    assert 1 <= engine.stats().adapters_loaded <= 2  # one, where the bad one came last


async def test_live_requests_beside_rows(engine):
    """Live requests are answered, whole and as streams, while rows run, and rows that stepped aside as ever."""
    words = ["red", "green", "blue", "white", "black", "brown", "grey", "pink"]
    said = [f"{words[n % 8]} {words[n // 8 % 8]}" for n in range(192)]
    rows = [
        chat_row(n, f"Say: {text}", model=("", "upper")[n % 2], temperature=0, max_tokens=48)
        for n, text in enumerate(said)
    ]
    running = asyncio.create_task(run(engine, rows))
    answers = []
    while not running.done():
        request = chat_request("Say: hello world", temperature=0, max_tokens=48, model="upper")
        answers.append(await answer_to(engine, request))
        request = chat_request("Say: hello world", stream=True, temperature=0, max_tokens=48)
        head, events = await answer_to(engine, request)
        deltas = [json.loads(event[6:]) for event in events.decode().split("\n\n") if event.startswith("data: {")]
        assert head.content_type.startswith("text/event-stream")
        assert "".join(delta["choices"][0]["delta"].get("content") or "" for delta in deltas) == "hello world"
    beside = await running
    assert {json.loads(body)["choices"][0]["message"]["content"] for _, body in answers} == {"HELLO WORLD"}
    assert len(answers) >= 2
    assert [beside.text(n) for n in range(192)] == [(text, text.upper())[n % 2] for n, text in enumerate(said)]
    assert engine.stats().live == 0
    head, body = await answer_to(engine, chat_request("x", max_tokens=0))
    assert head.status == 400
    assert json.loads(body)["error"]["message"]


async def test_answers_fit_the_schema_of_a_job(engine):
    """vLLM decodes guided: each answer of a row with a schema is JSON that fits; rows beside it answer as ever."""
    fields = schema_of_fields("label: positive|negative, sure: bool, tags: [yes|no], why?: good|bad")
    schema = OutputSchema(json.dumps(fields))
    rows = [
        chat_row(n, "Say: hello world", model=("", "upper")[n // 2 % 2], temperature=0, max_tokens=(48, 400)[n % 2])
        for n in range(32)
    ]
    for row in rows[1::2]:
        row.form = OpenAIForm(schema=schema)
    sink = await run(engine, rows)
    for n in range(1, 32, 2):
        answer = json.loads(sink.text(n))
        assert validator_of(schema).problems(answer) == []
        assert list(answer) == list(fields["properties"])
    assert [sink.text(n) for n in range(0, 32, 2)] == ["hello world", "HELLO WORLD"] * 8


async def test_a_batch_with_adapters_survives_the_servers_death(engine):
    """Base and adapters answer as trained, faults stay with their row, kill -9 costs nothing, no process stays."""
    rows = [
        chat_row(number, "Say: hello world", model=model, temperature=0, max_tokens=48)
        for number, model in enumerate(["", "upper", "reverse", "tiny"])
    ]
    odd = [
        body_row(4, {"input": "x"}, url="/v1/embeddings"),
        body_row(5, {"messages": "x"}),
        chat_row(6, "x", zz=1),
        chat_row(7, "x", response_format=POISON),
        chat_row(8, "x", top_k=10**30),
    ]
    sink = await run(engine, rows + odd)
    assert [sink.text(number) for number in range(4)] == [
        "hello world",
        "HELLO WORLD",
        "dlrow olleh",
        "hello world",
    ]
    assert [sink.code(number) for number in (4, 5, 6, 7, 8)] == [
        "url_not_supported",
        "bad_request",
        "unknown_parameter",
        "structured_output_too_large",
        "number_out_of_range",
    ]
    usage = sink.outcomes[0].usage
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0

    marker, server = marker_and_server(engine)
    assert len(guard.find_marked(marker)) >= 2
    os.kill(server, signal.SIGKILL)
    sink = await run(engine, rows)
    assert sink.text(1) == "HELLO WORLD"
    assert guard.find_marked(marker) == []
    marker, _ = marker_and_server(engine)
    assert len(guard.find_marked(marker)) >= 2
    await engine.stop()
    assert guard.find_marked(marker) == []


async def test_a_wrong_flag_is_told_in_one_line(tmp_path):
    """What vLLM says about a flag that it does not have reaches the user, not its usage page."""
    with pytest.raises(ModelFailed) as failed:
        await LlmEngine(tiny(engine_args={"no-such-flag": 1}), tmp_path, env=ENV).start()
    assert "unrecognized arguments: --no-such-flag" in failed.value.message
    assert len(failed.value.message) < 1000


async def test_the_root_cause_of_a_failed_start_is_told(tmp_path):
    """A value that vLLM refuses is told with vLLM's own reason."""
    with pytest.raises(ModelFailed, match="max_model_len|max-model-len|maximum"):
        await LlmEngine(tiny(engine_args={"max-model-len": 10_000_000}), tmp_path, env=ENV).start()

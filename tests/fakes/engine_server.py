"""A server that behaves like `vllm serve` as far as batchmill uses it: a program for tests, no part of the package.

It takes vLLM's flags, serves on a Unix socket, forks an "engine core" and a "worker" as vLLM does, and answers with the
last message: in capitals for an adapter called `upper`, backwards for any other adapter, or after the words in its
folder's file `says`. Adapters are loaded and unloaded as in vLLM; one whose folder has a file `broken` cannot be
loaded, and says what is in there; one with a file `deadly` ends the server; one with a file `clings` is not let go of.

What a row's text starts with decides its fate: `crash`, `core-dies`, `fails`, `fails-once`, `resets-once`, `hangs`,
`too-long`. With `stream` the words of the answer come one by one; a text that starts with `trickles` never ends. A
request that is given up is noted as a line of FAKE_CALLS with the path `abandoned`.

Environment: FAKE_HEALTH_DELAY_S, FAKE_REPLY_S, FAKE_LOAD_S, FAKE_SEQS, FAKE_KV_TOKENS, FAKE_START_ERROR, FAKE_STUBBORN,
FAKE_PIDS (a file that gets the process ids), FAKE_CALLS (a file that gets one line per call received), FAKE_ONCE (a
directory that remembers, across restarts, what happened once), FAKE_CRASH_AMONG (how many requests must have come
before the first `crash` does what it says).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))  # it is run by its path

import completions as completing  # noqa: E402

ENV = os.environ
HANGS_S = 3600.0


def setting(name: str, default: float) -> float:
    return float(ENV.get(name, default))


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="api_server.py")
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--max-cpu-loras", type=int, default=1)
    parser.add_argument("--runner", default="generate")
    return parser.parse_known_args()


def idle() -> None:
    """What a child does: nothing, until a signal ends it."""
    if ENV.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def fork_core() -> int:
    """The engine core, with a worker below it that leaves the session."""
    core = os.fork()
    if core == 0:
        worker = os.fork()
        if worker == 0:
            os.setsid()
            note_pid("worker")
            idle()
        note_pid("core")
        idle()
    return core


def note_pid(what: str) -> None:
    if path := ENV.get("FAKE_PIDS"):
        with open(path, "a") as file:
            file.write(f"{what} {os.getpid()}\n")


class Engine:
    """The numbers of /metrics and the one way through the engine."""

    def __init__(self, options: argparse.Namespace, core: int) -> None:
        self.options = options
        self.core = core
        self.slots = asyncio.Semaphore(int(setting("FAKE_SEQS", 128)))
        self.started = time.monotonic()
        self.running = self.waiting = self.preemptions = self.tokens = 0
        self.asked = 0
        self.adapters: dict[str, str] = {}  # that are loaded, by name
        self.users: dict[str, int] = {}  # requests of each that run

    @property
    def is_healthy(self) -> bool:
        return time.monotonic() - self.started >= setting("FAKE_HEALTH_DELAY_S", 0.05)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.running * 100 / setting("FAKE_KV_TOKENS", 1e9))

    async def step(self) -> None:
        """One request's time in the engine."""
        self.waiting += 1
        try:
            async with self.slots:
                self.waiting -= 1
                self.running += 1
                try:
                    if self.kv_usage >= 1.0:
                        self.preemptions += 1
                    await asyncio.sleep(setting("FAKE_REPLY_S", 0.0))
                finally:
                    self.running -= 1
                    self.waiting += 1
        finally:
            self.waiting -= 1
        self.tokens += 4


ENGINE = web.AppKey("engine", Engine)


def error(status: int, message: str, kind: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


def happened_before(text: str) -> bool:
    """Whether this text was seen already, by this server or one before it."""
    mark = Path(ENV["FAKE_ONCE"]) / text.replace("/", "_")
    if mark.exists():
        return True
    mark.touch()
    return False


async def suffer(text: str, request: web.Request) -> web.Response | None:
    """What befalls a row of this text; None: it is answered."""
    engine = request.app[ENGINE]
    engine.asked += 1
    if text.startswith("crash"):
        if (count := setting("FAKE_CRASH_AMONG", 0)) and not happened_before("crash"):
            while engine.asked < count:
                await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    if text.startswith("core-dies"):
        os.kill(engine.core, signal.SIGKILL)
        return error(500, "EngineCore encountered an issue. See stack trace for the root cause.", "InternalServerError")
    if text.startswith("fails-once") and not happened_before(text):
        return error(500, "once", "InternalServerError")
    if text.startswith("resets-once") and not happened_before(text):
        assert request.transport is not None
        request.transport.abort()
    if text.startswith("fails:"):
        return error(500, "it always fails", "InternalServerError")
    if text.startswith("too-long"):
        return error(400, "This model's maximum context length is 16 tokens.", "BadRequestError")
    if text.startswith("hangs"):
        engine.running += 1
        await asyncio.sleep(HANGS_S)
    return None


async def read_body(request: web.Request) -> tuple[dict[str, Any], web.Response | None]:
    engine = request.app[ENGINE]
    body = json.loads(await request.read())
    note_call(request.path, body)
    names = [*engine.options.served_model_name, *engine.adapters]
    if body.get("model") and body["model"] not in names:
        return body, error(404, f"The model `{body['model']}` does not exist. Valid: {names}", "NotFoundError")
    return body, None


def note_call(path: str, body: dict[str, Any]) -> None:
    if calls := ENV.get("FAKE_CALLS"):
        with open(calls, "a") as file:
            file.write(json.dumps({"url": path, "body": body}) + "\n")


def answer(engine: Engine, model: str, text: str) -> str:
    if (place := engine.adapters.get(model)) is not None:
        says = Path(place) / "says"
        if says.exists():
            return f"{says.read_text()} {text}"
        return text.upper() if model.partition("/")[0] == "upper" else text[::-1]
    return text


async def stream(request: web.Request, model: str, text: str) -> web.StreamResponse:
    """The words of an answer as server-sent events; an answer that trickles has no last one."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    words = text.split()
    try:
        while words:
            chunk = {"model": model, "choices": [{"index": 0, "delta": {"content": words[0]}}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if text.startswith("trickles"):
                await asyncio.sleep(0.01)
            else:
                words.pop(0)
    except (ConnectionError, asyncio.CancelledError):
        note_call("abandoned", {})
        raise
    await response.write(b"data: [DONE]\n\n")
    return response


async def chat(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    body, refused = await read_body(request)
    if refused is not None:
        return refused
    if not isinstance(body.get("messages"), list):
        return error(400, "[{'type': 'missing', 'loc': ('body', 'messages')}]", "BadRequestError")
    model = body.get("model") or engine.options.served_model_name[0]
    engine.users[model] = engine.users.get(model, 0) + 1
    try:
        return await reply_to(request, body, model)
    finally:
        engine.users[model] -= 1


async def reply_to(request: web.Request, body: dict[str, Any], model: str) -> web.StreamResponse:
    engine = request.app[ENGINE]
    text = str(body["messages"][-1]["content"])
    if (ending := await suffer(text, request)) is not None:
        return ending
    await engine.step()
    tokens = {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    if body.get("stream"):
        return await stream(request, model, answer(engine, model, text))
    message = {"role": "assistant", "content": answer(engine, model, text)}
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {**tokens, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    return web.json_response(reply)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answers as a chat does, token by token. See `completions.py`."""
    engine = request.app[ENGINE]
    body, refused = await read_body(request)
    if refused is not None:
        return refused
    if (why := completing.wrong(body)) is not None:
        return error(400, why, "BadRequestError")
    if isinstance(body["prompt"], str) and (ending := await suffer(body["prompt"], request)) is not None:
        return ending
    await engine.step()
    model = body.get("model") or engine.options.served_model_name[0]
    return await completing.answer(request, body, model, lambda text: answer(engine, model, text))


async def classify(request: web.Request) -> web.StreamResponse:
    body, refused = await read_body(request)
    return refused or completing.classes(body, body.get("model") or request.app[ENGINE].options.served_model_name[0])


async def embeddings(request: web.Request) -> web.Response:
    _, refused = await read_body(request)
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    data = [{"index": 0, "object": "embedding", "embedding": [0.25, -1.5]}]
    return refused or web.json_response({"object": "list", "data": data, "usage": usage})


async def health(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[ENGINE].is_healthy else 503)


async def models(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    names = [*engine.options.served_model_name, *engine.adapters]
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


async def metrics(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    label = f'{{engine="0",model_name="{engine.options.served_model_name[0]}"}}'
    values = {
        "vllm:num_requests_running": engine.running,
        "vllm:num_requests_waiting": engine.waiting,
        "vllm:kv_cache_usage_perc": engine.kv_usage,
        "vllm:num_preemptions_total": engine.preemptions,
        "vllm:prompt_tokens_total": engine.tokens,
        "vllm:generation_tokens_total": engine.tokens,
        "vllm:prefix_cache_queries_total": engine.tokens,
        "vllm:prefix_cache_hits_total": engine.tokens // 4,
    }
    lines = [f"# HELP {name} x\n# TYPE {name} gauge\n{name}{label} {value}" for name, value in values.items()]
    return web.Response(text="\n".join(lines) + "\n")


async def load_adapter(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], json.loads(await request.read())
    note_call(request.path, body)
    name, place = body["lora_name"], Path(body["lora_path"])
    if name in engine.adapters:
        return error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
    await asyncio.sleep(setting("FAKE_LOAD_S", 0.0))
    if (place / "deadly").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if not place.is_dir():
        return error(404, f"No adapter found for {place}", "NotFoundError")
    if (place / "broken").exists():
        return error(500, (place / "broken").read_text(), "InternalServerError")
    if len(engine.adapters) >= engine.options.max_cpu_loras:
        note_call("too-many", {"held": sorted(engine.adapters)})
    engine.adapters[name] = str(place)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], json.loads(await request.read())
    note_call(request.path, body)
    if engine.users.get(body["lora_name"]):
        note_call("unloaded-in-use", body)
    if (Path(engine.adapters.get(body["lora_name"], "")) / "clings").exists():
        await asyncio.sleep(HANGS_S)
    if engine.adapters.pop(body["lora_name"], None) is None:
        return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.", "NotFoundError")
    return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")


async def not_found(request: web.Request) -> web.Response:
    """What FastAPI says to a path it does not have."""
    return web.json_response({"detail": "Not Found"}, status=404)


async def serve(options: argparse.Namespace, core: int) -> None:
    app = web.Application(client_max_size=1 << 30)
    app[ENGINE] = Engine(options, core)
    app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.get("/metrics", metrics)])
    app.add_routes([web.post("/v1/load_lora_adapter", load_adapter)])
    app.add_routes([web.post("/v1/unload_lora_adapter", unload_adapter)])
    if options.runner == "pooling":
        app.add_routes([web.post("/v1/embeddings", embeddings), web.post("/classify", classify)])
    else:
        app.add_routes([web.post("/v1/chat/completions", chat), web.post("/v1/completions", completions)])
    app.router.add_route("*", "/{path:.*}", not_found)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, options.uds).start()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    # As in vLLM, SIGTERM ends the server in order, and so does the death of its engine core.
    for number in (signal.SIGTERM, signal.SIGCHLD):
        loop.add_signal_handler(number, ended.set)
    print("fake engine: Application startup complete.", flush=True)
    await ended.wait()
    await runner.cleanup()
    with contextlib.suppress(ProcessLookupError):
        os.kill(core, signal.SIGTERM)


def main() -> None:
    options, _ = parse()
    note_pid("server")
    if message := ENV.get("FAKE_START_ERROR"):
        print("Traceback (most recent call last):\n  File x\n" + message, file=sys.stderr, flush=True)
        sys.exit(1)
    asyncio.run(serve(options, fork_core()))


if __name__ == "__main__":
    main()

"""Deployments for tests of Modelbit's dialect: a whole server in this process, and functions deployed to it."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
from dialects.open_server import open_server

from batchmill.serving import Running
from batchmill.wire import bundles
from batchmill.wire.bundles import DeployOrder

TIMEOUT_S = 60.0
HOOKS = '[server]\nprivate_hosts = ["127.0.0.1"]\n'
CODE = '''
import datetime, math, os, time

from batchmill import batched


def doubler(foo: int):
    """Twice as much."""
    if isinstance(foo, int) and foo < 0:
        raise ValueError(f"{foo} is less than nothing")
    return 2 * foo


def echo3(a: int, b: str, c: float):
    return [a, b, c]


def of_dict(d):
    return d["my_key"] * 2


def nothing():
    return 7


def odd(kind):
    if kind == "numpy":
        import numpy
        return [numpy.int64(3), numpy.bool_(True), numpy.array([1, 2]), numpy.float64("nan")]
    if kind == "date":
        return datetime.datetime(2024, 1, 2)
    if kind == "object":
        class Found:
            def __init__(self):
                self.x = 1
        return Found()
    if kind == "nan":
        return [math.nan, (math.inf, 1.5)]
    if kind == "circle":
        found = []
        found.append(found)
        return found
    if kind == "function":
        return math
    return kind


def frames(df):
    assert list(df.columns) == ["a", "b"]
    return [f"{index}:{row.a}{row.b}" for index, row in zip(df.index, df.itertuples())]


def short_frames(df):
    return [1]


def slow(seconds):
    time.sleep(seconds)
    return "done"


def exits(code):
    os._exit(code)


@batched(8)
def many(xs):
    if "bad" in xs:
        raise KeyError("bad")
    return [f"{x}!" for x in xs]


def counting(to):
    for n in range(to):
        yield n
'''


async def deploy(running: Running, name: str, code: str = CODE, **values):
    """A new version of the function `name` of `code`; `told` are further fields of the order."""
    order = DeployOrder(**({"name": name, "target": f"app.py:{name}", "source": f"app.py:{name}"} | values))
    out = io.BytesIO()
    bundles.write(out, order, {"app.py": code.encode()})
    with tempfile.NamedTemporaryFile(suffix=".tar.gz") as file:
        file.write(out.getvalue())
        file.flush()
        return (await running.services.versions.deploy(Path(file.name))).version


@contextlib.asynccontextmanager
async def open_deployments(folder: Path, *names: str, config: str = "", **values) -> AsyncIterator[Deployments]:
    """A server to which these functions of CODE are deployed."""
    async with open_server(folder, config) as running:
        for name in names:
            await deploy(running, name, **values)
        async with httpx2.AsyncClient(base_url=running.url, timeout=TIMEOUT_S) as http:
            yield Deployments(running, http)


class Deployments:
    def __init__(self, running: Running, http: httpx2.AsyncClient) -> None:
        self.running, self.http = running, http

    async def call(self, place: str, data: object, **fields: object) -> httpx2.Response:
        """POST to `place`, "doubler/latest"."""
        return await self.http.post(f"/v1/{place}", json={"data": data, **fields})

    async def answer(self, place: str, data: object, **fields: object) -> object:
        """The `data` of a reply that is a success."""
        reply = await self.call(place, data, **fields)
        assert reply.status_code == 200, reply.text
        assert set(reply.json()) == {"data"}
        return reply.json()["data"]

    async def error(self, place: str, data: object, status: int, **fields: object) -> str:
        """The text of a reply that is an error."""
        reply = await self.call(place, data, **fields)
        assert (reply.status_code, set(reply.json())) == (status, {"error"}), reply.text
        return reply.json()["error"]

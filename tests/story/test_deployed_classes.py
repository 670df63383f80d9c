"""Classes whose validators are Python, at a real server: deployed, named by jobs, and run where deployed code runs."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import httpx2
import msgspec
import pydantic
import pytest
from fakes.answering_service import AnsweringService, choice
from fakes.beside import beside
from fakes.running_server import running_server

from batchmill import Client
from batchmill.errors import Conflict, Forbidden, InvalidInput, ModelFailed, UnknownName
from batchmill.wire.bundles import BUNDLE_MEDIA

CODE = """
import dataclasses, os, sys, time
from limits import MOST

@dataclasses.dataclass
class Review:
    label: str
    score: float

    def __post_init__(self) -> None:
        print("a print is nobody's")
        if self.label == "hangs":
            time.sleep(1000)
        if self.label == "ends":
            os._exit(1)
        if self.label == "looks":
            raise ValueError(str([os.path.exists(each) for each in sys.argv[-1:] + ["FOLDER/batchmill.toml"]][1:]))
        if self.score > MOST:
            raise ValueError(f"the score {self.score:g} is above {MOST}")
"""
CONFIG = """
[models.m]
engine = "openai"
source = "m"
base_url = "{url}"
api_key = "env:FAR_KEY"
"""
# Packages that this environment reads from elsewhere are shown to the sandbox.
ISOLATED = f"""
[functions]
isolate = "bubblewrap"
readable = {[str(Path(each.__file__).parents[1]) for each in (msgspec, pydantic)]}
"""
ANSWERS = {
    "fits": ['{"label":"a","score":1}'],
    "second": ['{"label":"a","score":3}', '{"label":"a","score":0.5}'],
    "never": ['{"label":"a","score":9}'],
    "hangs": ['{"label":"hangs","score":1}'],
    "ends": ['{"label":"ends","score":1}'],
    "looks": ['{"label":"looks","score":1}'],
}


def answer(body):
    asked = [message["content"] for message in body["messages"] if message["role"] == "user"]
    given = ANSWERS[asked[0]]
    return choice(given[min(len(asked) - 1, len(given) - 1)])


@pytest.fixture(scope="module")
def service():
    with beside(AnsweringService(answer)) as running:
        yield running


@pytest.fixture(scope="module", params=["", ISOLATED], ids=["", "isolated"])
def server(request, service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    code = folder / "code"
    code.mkdir()
    (code / "reviews.py").write_text(CODE.replace("FOLDER", str(folder)))
    (code / "limits.py").write_text("MOST = 1\n")
    with running_server(folder, CONFIG.format(url=service.url) + request.param, env={"FAR_KEY": "k"}) as running:
        running.is_isolated = bool(request.param)
        yield running


def command(server, *words, **environment):
    line = [sys.executable, "-m", "batchmill", *words]
    return subprocess.run(
        line, cwd=server.folder / "code", env=os.environ | environment, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip


@pytest.fixture(scope="module")
def keys(server):
    def make(project, scope):
        words = ("keys", "create", "--name", "k", "--project", project, "--scope", scope)
        done = command(server, "--data-dir", str(server.data_dir), *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return SimpleNamespace(own=make("one", "deploy"), small=make("one", "submit"), other=make("two", "deploy"))


@pytest.fixture
def Review(server, monkeypatch):
    monkeypatch.chdir(server.folder / "code")
    monkeypatch.syspath_prepend(server.folder / "code")
    for name in ("reviews", "limits"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("reviews").Review


def outcomes(job):
    return {row["text"]: row for row in job.to_arrow().to_pylist()}


def versions(client, name):
    return [each.number for each in client.model(name).show().versions if each.state == "ready"]


def test_a_class_goes_along_with_a_job(server, keys, Review):
    """`Client.run(schema=Class)` deploys and orders in one step. The class is read and run where deployed code runs;
    the same code is the same version."""
    data = {"text": list(ANSWERS)}
    with Client(server.url, api_key=keys.own) as client:
        job = client.run(data, model="m", prompt="{text}", schema=Review, progress=False)
        rows = outcomes(job)
        assert [rows["fits"]["score"], rows["second"]["score"], rows["second"]["warnings"]] == [1, 0.5, "asked_again"]
        assert rows["never"]["error"] == "schema_mismatch: the score 9 is above 1 (asked 3 times)"
        assert rows["hangs"]["error"] == "schema_mismatch: the validator took more than 1 s and was stopped"
        assert "ended by exit 1" in rows["ends"]["error"]
        assert rows["looks"]["error"].startswith(f"schema_mismatch: [{not server.is_isolated}]")
        schema = job.view.schema
        assert schema.validator == "reviews.py:Review" and schema.version.folder == "" and schema.version.python is None
        name = schema.version.reference.partition("@")[0]
        again = client.run({"text": ["fits"]}, model="m", prompt="{text}", schema=Review, progress=False)
        assert again.view.schema.version == schema.version and versions(client, name) == [1]
        assert name not in [each.name for each in client.models()]
        with pytest.raises(UnknownName):
            client.run({"text": ["fits"]}, model=name, prompt="{text}")
    headers = {"authorization": f"Bearer {keys.own}"}
    called = httpx2.post(f"{server.url}/v1/{name}/latest", json={"data": 1}, headers=headers, timeout=60)
    assert called.status_code == 404


def test_a_key_without_the_scope(server, keys, Review):
    """It brings no code, and hears the way out; a class that was deployed for its project it may name."""
    refused = pytest.raises(Forbidden, match=r"may not bring to the server.*--schema --name NAME")
    with Client(server.url, api_key=keys.small) as client, refused:
        client.run({"text": ["fits"]}, model="m", prompt="{text}", schema=Review)
    with Client(server.url, api_key=keys.own) as client:
        reply = client.deploy(Review, name="review", kind="schema")
        assert reply.version.schema["properties"].keys() == {"label", "score"} and reply.version.interface is None
    with Client(server.url, api_key=keys.small) as client:
        job = client.run({"text": ["never"]}, model="m", prompt="{text}", validator="review@1", progress=False)
        assert "the score 9 is above 1" in outcomes(job)["never"]["error"]
    with Client(server.url, api_key=keys.other) as client:
        for reference in ("review", "review@main/1", job.view.schema.version.reference, "none"):
            with pytest.raises(UnknownName, match="does not exist or you do not have access to it"):
                client.run({"text": ["fits"]}, model="m", prompt="{text}", validator=reference)
        with pytest.raises(UnknownName):
            client.model("review").show()


def test_commands(server, keys):
    """`run --schema FILE.py:CLASS` at a server, `deploy --schema` and `run --validator`."""
    (server.folder / "code" / "in.jsonl").write_text('{"text": "second"}\n{"text": "never"}\n')
    run = ("run", "in.jsonl", "--model", "m", "--prompt", "{text}", "--server", server.url)
    one = command(server, *run, "--schema", "reviews.py:Review", "-o", "one.jsonl", BATCHMILL_API_KEY=keys.own)
    deployed = command(
        server, "deploy", "reviews.py:Review", "--schema", "--name", "by_name", "--server", server.url,
        BATCHMILL_API_KEY=keys.own,
    )  # fmt: skip
    assert "is ready: a schema with the fields label, score" in deployed.stdout, deployed.stderr
    two = command(server, *run, "--validator", "by_name", "-o", "two.jsonl", BATCHMILL_API_KEY=keys.small)
    for done, name in ((one, "one.jsonl"), (two, "two.jsonl")):
        assert done.returncode == 3, done.stderr
        rows = [json.loads(line) for line in (server.folder / "code" / name).read_text().splitlines()]
        assert rows[0]["score"] == 0.5 and "is above 1" in rows[1]["error"]
    plan = command(server, "plan", *run[1:], "--validator", "by_name", BATCHMILL_API_KEY=keys.small)
    assert plan.returncode == 0 and "up to 3 requests" in plan.stdout + plan.stderr, plan.stdout + plan.stderr
    small = command(server, *run, "--schema", "reviews.py:Review", "-o", "x.jsonl", BATCHMILL_API_KEY=keys.small)
    assert small.returncode not in (0, 3) and "use a key with the scope deploy" in small.stderr.replace("\n", " ")


def bundle(order, **files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in {"deploy.json": json.dumps(order), **files}.items():
            info = tarfile.TarInfo(name if name == "deploy.json" else f"code/{name}")
            info.size = len(data.encode())
            archive.addfile(info, io.BytesIO(data.encode()))
    return out.getvalue()


def test_without_the_sdk(server, keys):
    """An archive and an order are two requests."""
    code = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    label: str\n    score: float\n"
    code += "    def __post_init__(self):\n        raise ValueError('never')\n"
    headers = {"authorization": f"Bearer {keys.own}"}
    url = f"{server.url}/batchmill/v1"
    made = httpx2.post(
        f"{url}/models", content=bundle({"name": "", "kind": "schema", "target": "a.py:A"}, **{"a.py": code}),
        headers=headers | {"content-type": BUNDLE_MEDIA}, timeout=60,
    ).json()  # fmt: skip
    assert "version" in made, made
    name = made["version"]["name"]
    files = {"file": ("in.jsonl", b'{"text": "fits"}\n')}
    sent = httpx2.post(f"{server.url}/v1/files", files=files, data={"purpose": "batch"}, headers=headers).json()
    order = {"files": [sent["id"]], "models": ["m"], "prompt": "{text}", "validator": f"{name}@1"}

    def post(order):
        return httpx2.post(f"{url}/jobs", json=order, headers=headers, timeout=60).json()

    with Client(server.url, api_key=keys.own) as client:
        job = client.job(post(order)["job"]["id"])
        job.wait()
        assert job.view.errors == {"schema_mismatch": 1}
    assert post(order | {"schema": {"type": "object"}})["error"]["code"] == "schema_conflict"
    assert post(order | {"validator": "m"})["error"]["code"] == "validator_not_found"


def send(client, order, code):
    with io.BytesIO(bundle({"kind": "schema", "target": "a.py:A"} | order, **{"a.py": code})) as file:
        return client.send_bundle(file).version.number


def limited(most):
    """A class that takes scores up to a limit."""
    code = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    label: str\n    score: float\n"
    return code + (
        f"    def __post_init__(self):\n        if self.score > {most}:\n            raise ValueError('above {most}')\n"
    )


def refusal(client, code, name="", **settings):
    with pytest.raises((ModelFailed, InvalidInput, Conflict)) as raised:
        send(client, {"name": name} | settings, code)
    return raised.value.message


def test_classes_that_cannot_be_used(server, keys):
    """Each is refused when it is deployed, with what is wrong and the way out."""
    pydantic = "from pydantic import BaseModel\nclass A(BaseModel):\n    n: int\n"
    made = pydantic + "    @classmethod\n    def model_json_schema(cls):\n        return {document}\n"
    with Client(server.url, api_key=keys.own) as client:
        missing = refusal(client, "import no_such_package\nclass A: pass\n")
        assert "lacks no_such_package" in missing and "--requirements" in missing and "No module named" in missing
        for code, words in (
            ("class B: pass\n", "there is no 'A'"),
            ("A = 3\n", "is no class"),
            ("class A: pass\n", "is no pydantic model, dataclass"),
            ("1/0\n", "ZeroDivisionError"),
            ("import os; os._exit(4)\n", "ended by exit 4"),
            ("import sys; sys.exit(4)\n", "SystemExit"),
            (made.format(document={"type": "nonsense"}), "cannot be used"),
            (made.format(document={"$ref": "https://x.example/y"}), "cannot be used"),
            (made.format(document=[1]), "has no JSON Schema"),
            (made.format(document="float('nan')"), "has no JSON Schema"),
        ):
            assert words in refusal(client, code), (code, words, refusal(client, code))
        assert "gpus is a setting of functions" in refusal(client, pydantic, gpus=1)
        assert "secrets is a setting of functions" in refusal(client, pydantic, secrets={"A": "env:B"})
        assert "name it" in refusal(client, pydantic, branch="other")
        assert "reserved name" in refusal(client, pydantic, name="schema_" + "0" * 20)
        send(client, {"name": "double", "kind": "model", "target": "a.py:f"}, "def f(n: int): return 2 * n\n")
        assert "the name of a function" in refusal(client, pydantic, name="double")
        with pytest.raises(UnknownName, match="is a model, not a schema class"):
            client.run({"text": ["fits"]}, model="m", prompt="{text}", validator="double")


def test_versions_in_use(server, keys):
    """A job keeps its version when the class is deployed again; a version in use is not removed; a job whose version is
    gone says so."""
    with Client(server.url, api_key=keys.own) as client:

        def deploy(most):
            return send(client, {"name": "pinned"}, limited(most))

        assert deploy(1) == 1
        data = {"text": ["never", "fits"]}
        job = client.run(
            data, model="m", prompt="{text}", validator="pinned", schema_attempts=0, limit=1, progress=False
        )
        assert deploy(99) == 2 and deploy(99) == 2
        with pytest.raises(Conflict, match="an unfinished job uses pinned@main/1"):
            client.model("pinned").remove(version=1)
        job.resume()
        job.wait()
        assert "above 1" in outcomes(job)["never"]["error"]
        client.model("pinned").remove(version=1)
        with pytest.raises(Exception, match="pinned@main/1, which validates the answers of this job, was removed"):
            job.retry()
        with pytest.raises(UnknownName, match="pinned@main/1 is removed; ready versions of pinned: main/2"):
            client.run(data, model="m", prompt="{text}", validator="pinned@1")


def test_a_killed_server(tmp_path):
    """Killed between an answer that did not fit and the next one, a server goes on with the version that the job began
    with, although the class was deployed again; its code comes from the object store if the data directory lost it."""
    killed = []

    def answer_once(body):
        if len(body["messages"]) > 1 and not killed:
            with Client(server.url) as other:
                killed.append(send(other, {"name": "review"}, limited(99)))
            server.signal(signal.SIGKILL)
        return answer(body)

    with contextlib.ExitStack() as stack:
        service = stack.enter_context(beside(AnsweringService(answer_once)))
        config = CONFIG.format(url=service.url) + f'[storage]\nobjects = "file://{tmp_path}/store"\n'
        config += f'[secrets]\nkey_file = "{tmp_path}/keys"\n'
        server = stack.enter_context(running_server(tmp_path, config, env={"FAR_KEY": "k"}))
        client = stack.enter_context(Client(server.url))
        assert send(client, {"name": "review"}, limited(1)) == 1
        rows = tmp_path / "in.jsonl"
        rows.write_text('{"text": "second"}\n')
        job = client.submit(rows, model="m", prompt="{text}", validator="review")
        server.wait()
        shutil.rmtree(server.data_dir / "models")
        server.start()
        job = stack.enter_context(Client(server.url)).job(job.id)
        job.wait()
        (row,) = job.results()
        assert killed == [2] and row["score"] == 0.5, row
        assert job.view.schema.version.reference == "review@main/1"

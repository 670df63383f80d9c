"""Image, audio and document columns, in jobs of the real command line."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from click.testing import CliRunner, Result
from fakes.answering_service import AnsweringService, choice
from fakes.anthropic_batches import AnthropicFake
from fakes.beside import beside
from fakes.gemini_batches import GeminiFake
from fakes.s3_server import bucket_client, s3_environment, s3_server
from fakes.web_files import WebFile, web_files

import batchmill
from batchmill.cli.main import cli
from batchmill.cli.session import Session

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
JPEG = b"\xff\xd8\xff\xe0" + b"pixels"
WAV = b"RIFF\0\0\0\0WAVEfmt "
PDF = b"%PDF-1.7 text"


def url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command at a service that answers "fine"; `bodies` are what it was sent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    Path("pictures").mkdir()
    Path("pictures/a.png").write_bytes(PNG)
    Path("pictures/b.jpg").write_bytes(JPEG)
    with beside(AnsweringService(lambda body: choice("fine"))) as service:
        entry = '[models.m]\nengine = "openai"\nsource = "s"\nbase_url = "{}"\n'
        Path("batchmill.toml").write_text(entry.format(service.url))

        def go(source: str, *flags: str, verb: str = "run", model: str = "m", prompt: str = "See {q}") -> Result:
            output = ("-o", "out.jsonl") if verb == "run" and "-o" not in flags else ()
            command = [verb, source, "--model", model, "--prompt", prompt, *flags, *output, "--data-dir", "data"]
            return CliRunner().invoke(cli, command, obj=Session())

        go.bodies = service.bodies
        yield go


def table(*rows: dict) -> str:
    Path("pictures/in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "pictures/in.jsonl"


def results() -> list[dict]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def contents(run) -> list:
    """The user's message of each call, by the text in it."""
    return sorted(
        (body["messages"][-1]["content"] for body in run.bodies), key=lambda content: json.dumps(content)[-20:]
    )


def test_cells_become_parts_of_the_message(run):
    """Images, recordings and documents go before the text, in the order of their kinds; an empty cell is no part."""
    Path("pictures/s.wav").write_bytes(WAV)
    Path("pictures/d.pdf").write_bytes(PDF)
    rows = [
        {"q": "1", "img": "a.png", "more": str(Path("pictures/b.jpg").absolute()), "say": "s.wav", "doc": "d.pdf"},
        {"q": "2", "img": url("image/gif", b"GIF89a--"), "more": "", "say": None, "doc": ""},
        {"q": "3", "img": None, "more": "", "say": "", "doc": ""},
    ]
    flags = ("--image", "img", "--image", "more", "--audio", "say", "--document", "doc")
    result = run(table(*rows), *flags, "--system", "Be brief")
    assert result.exit_code == 0, result.output
    assert contents(run) == [
        [
            {"type": "image_url", "image_url": {"url": url("image/png", PNG)}},
            {"type": "image_url", "image_url": {"url": url("image/jpeg", JPEG)}},
            {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}},
            {"type": "file", "file": {"filename": "document.pdf", "file_data": url("application/pdf", PDF)}},
            {"type": "text", "text": "See 1"},
        ],
        [
            {"type": "image_url", "image_url": {"url": url("image/gif", b"GIF89a--")}},
            {"type": "text", "text": "See 2"},
        ],
        "See 3",
    ]
    assert [row | {"output": "fine", "error": None} for row in rows] == results()


def test_a_row_whose_file_is_no_image_fails_alone(run):
    """Missing, broken, too large or of another kind: the row's error says so, and the others run."""
    Path("pictures/note.png").write_text("words")
    Path("pictures/large.png").write_bytes(PNG + b"x" * 200)
    os.mkfifo("pictures/pipe.png")
    with open("batchmill.toml", "a") as file:
        file.write("[limits]\nmedia_bytes_max = 100\nmedia_row_bytes_max = 20\n")
    cells = ["a.png", [1], "gone.png", "note.png", "large.png", "pipe.png", "ftp://h/a.png", "data:image/png,x", 7,
             "data:image/png;base64,?", "\0", "http://127.0.0.1:9/a.png"]  # fmt: skip
    rows = [{"q": str(n), "img": cell, "two": ""} for n, cell in enumerate(cells)]
    result = run(table(*rows, {"q": "last", "img": "a.png", "two": "b.jpg"}), "--image", "img", "--image", "two")
    codes = [(row["error"] or "").partition(":")[0] for row in results()]
    assert codes == [
        "", "media_invalid", "media_missing", "media_invalid", "media_too_large", "media_missing",
        "media_not_allowed", "media_invalid",
        "media_invalid", "media_invalid", "media_missing", "media_not_allowed", "media_too_large",
    ], result.output  # fmt: skip
    assert len(run.bodies) == 1
    assert [list(row) for row in results()] == [["q", "img", "two", "output", "error"]] * len(codes)


def test_urls_are_fetched_once_through_the_guard(run):
    """What is not an image, or not there, is its row's error; a URL that rows share is one request."""
    with web_files() as web:
        web.files |= {"/good.png": WebFile(PNG), "/page.png": WebFile(b"<html>")}
        with open("batchmill.toml", "a") as file:
            file.write(f'[server]\nprivate_hosts = ["{web.host}"]\n')
        cells = [f"{web.url}/{name}.png" for name in ("good", "good", "gone", "page")]
        result = run(table(*({"q": str(n), "img": cell} for n, cell in enumerate(cells))), "--image", "img")
    codes = [(row["error"] or "").partition(":")[0] for row in results()]
    assert codes == ["", "", "media_missing", "media_invalid"], result.output
    assert sorted(path for path, _ in web.requests) == ["/gone.png", "/good.png", "/page.png"]
    assert contents(run)[0][0]["image_url"]["url"] == url("image/png", PNG)


def allow(web, *lines: str) -> None:
    """Let the owner's rules reach a server of the test."""
    with open("batchmill.toml", "a") as file:
        file.write("\n".join([*lines, "[server]", f'private_hosts = ["{web.host}"]', ""]))


def test_only_rows_that_are_sent_are_fetched(run):
    """Neither a plan nor an estimate fetches anything, and a sample what its rows name; the job fetches the others."""
    with web_files() as web:
        allow(web)
        web.files = {f"/{n}.png": WebFile(PNG) for n in range(30)}
        source = table(*({"q": str(n), "img": f"{web.url}/{n}.png"} for n in range(30)))
        for verb in ("plan", "estimate"):
            result = run(source, "--image", "img", verb=verb)
            assert result.exit_code == 0 and web.requests == [], result.output
        sampled = run(source, "--image", "img", "--limit", "4")
        asked = [path for path, _ in web.requests]
        assert len(asked) == len(set(asked)) == 4, sampled.output
        assert run(source, "--image", "img").exit_code == 0
        asked = [path for path, _ in web.requests]
        assert len(asked) == len(set(asked)) == 30 and len(run.bodies) == 30
    assert [row["output"] for row in results()] == ["fine"] * 30


def test_a_retry_fetches_what_could_not_be_fetched(run):
    """A server that is down fails the row with an error of its own, without a call."""
    with web_files() as web:
        allow(web, "limits.attempts_max = 2")
        web.files["/a.png"] = WebFile(PNG, failures=[503] * 2)
        ended = run(table({"q": "1", "img": f"{web.url}/a.png"}), "--image", "img")
        assert ended.exit_code == 3 and run.bodies == [], ended.output
        assert re.match(
            r"media_unavailable: .* the server answers 503, 2 times; `batchmill retry`", results()[0]["error"]
        )
        job = re.search(r"job_[0-9a-f]{20}", ended.output)[0]
        retried = CliRunner().invoke(cli, ["retry", job, "--data-dir", "data"], obj=Session())
        assert retried.exit_code == 0 and results()[0]["output"] == "fine", retried.output
        assert len(web.requests) == 3


def test_a_kill_while_urls_are_fetched_loses_nothing(run):
    """The same command goes on: each row has one outcome, and what was answered is not asked again."""
    with web_files() as web:
        allow(web)
        web.files = {f"/{n}.png": WebFile(PNG, gate=threading.Event() if n > 2 else None) for n in range(6)}
        source = table(*({"q": str(n), "img": f"{web.url}/{n}.png"} for n in range(6)))
        flags = ("--model", "m", "--prompt", "See {q}", "--image", "img", "-o", "out.jsonl", "--data-dir", "data")
        command = [sys.executable, "-m", "batchmill", "run", source, *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            assert web.wait_for_paths(6)
            os.killpg(process.pid, signal.SIGKILL)
        for file in web.files.values():
            file.gate = None if file.gate is None else file.gate.set()
        result = run(source, "--image", "img")
    assert result.exit_code == 0, result.output
    assert [(row["q"], row["output"]) for row in results()] == [(str(n), "fine") for n in range(6)]
    sent = [body["messages"][-1]["content"][-1]["text"] for body in run.bodies]
    assert sorted(set(sent)) == [f"See {n}" for n in range(6)] and all(sent.count(f"See {n}") == 1 for n in (3, 4, 5))


def test_an_update_looks_at_media_again(run):
    """Without it a finished job is done; with it rows whose files or URLs have changed run, the others do not."""
    with web_files() as web:
        allow(web)
        web.files["/a.png"] = WebFile(PNG)
        web.files["/b.png"], web.files["/c.png"] = WebFile(PNG + b"b", etag=""), WebFile(PNG + b"c", etag='"1"')
        names = ["a.png", "b.jpg", *(f"{web.url}/{name}.png" for name in "abc")]
        source = table(*({"q": str(n), "img": cell} for n, cell in enumerate(names)))
        assert run(source, "--image", "img").exit_code == 0
        first = results()
        digests = [json.loads(row["fetched"])[0][0] if "fetched" in row else "" for row in first]
        assert digests == ["", "", *(blake3(web.files[f"/{name}.png"].body).hexdigest() for name in "abc")]
        Path("pictures/b.jpg").write_bytes(JPEG + b"!")
        web.files["/c.png"] = WebFile(PNG + b"d", etag='"2"')
        assert run(source, "--image", "img").exit_code == 0 and len(run.bodies) == 5
        del web.requests[:]
        assert run(source, "--image", "img", "--reuse", verb="plan").exit_code == 0 and web.requests == []
        result = run(source, "--image", "img", "--update")
        asked = sorted(path for path, _ in web.requests)
    assert result.exit_code == 0, result.output
    assert ["reused_from" in row for row in results()] == [True, False, True, True, False]
    assert asked == ["/a.png", "/b.png", "/c.png", "/c.png"] and len(run.bodies) == 7
    assert [row["fetched"] for row in results()[2:4]] == [row["fetched"] for row in first[2:4]]


def test_workers_without_a_disk_get_what_cells_name(run, monkeypatch):
    """With [storage] files are copied to it once, and go with their job; what is no image fails alone, as elsewhere."""
    Path("pictures/note.png").write_text("words")
    shutil.copy("pictures/a.png", "pictures/same.png")
    with s3_server() as store, bucket_client(store, "media") as client, web_files() as web:
        for name, value in s3_environment(store).items():
            monkeypatch.setenv(name, value)
        allow(web, "[storage]", 'objects = "s3://media/batchmill"', "[secrets]", 'key_file = "keys"')
        web.files["/a.png"] = WebFile(PNG)
        cells = [f"{web.url}/a.png", url("image/png", PNG), "a.png", "same.png", "a.png", "b.jpg", "gone", "note.png"]
        source = table(*({"q": str(n), "img": cell} for n, cell in enumerate(cells)))
        result = run(source, "--image", "img", verb="plan")
        assert (result.exit_code, media_objects(client)) == (0, []), result.output
        result = run(source, "--image", "img")
        assert [row["output"] for row in results()] == ["fine"] * 6 + [None] * 2, result.output
        codes = [row["error"].partition(":")[0] for row in results()[6:]]
        assert codes == ["media_missing", "media_invalid"] and "/gone'" in results()[6]["error"]
        sent = {content[1]["text"]: content[0]["image_url"]["url"] for content in contents(run)}
        jpeg = url("image/jpeg", JPEG)
        assert sent == {f"See {n}": url("image/png", PNG) for n in range(5)} | {"See 5": jpeg}
        assert sorted(media_objects(client)) == sorted(blake3(each).hexdigest() for each in (PNG, JPEG))
        first = Path("out.jsonl").read_bytes()
        result = run(source, "--image", "img", "--limit", "1", "-o", "again.jsonl")
        for name in ("a.png", "same.png", "b.jpg"):
            Path("pictures", name).unlink()
        result = run(source, "--image", "img", "-o", "again.jsonl")
        assert result.exit_code == 3 and Path("again.jsonl").read_bytes() == first, result.output
        for line in cli_prints("jobs", "--json").splitlines():
            cli_prints("jobs", "rm", json.loads(line)["job"]["id"])
        assert media_objects(client) == []


def media_objects(client) -> list[str]:
    """The digests of the copies in a bucket."""
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="media").get("Contents", ())]
    return [key.rpartition("/")[2] for key in keys if "/media/" in key]


def cli_prints(*words: str) -> str:
    result = CliRunner().invoke(cli, [*words, "--data-dir", "data"], obj=Session())
    assert result.exit_code == 0, result.output
    return result.stdout


def test_bytes_of_parquet(run):
    """Binary columns, and structs with bytes as data sets of the Hugging Face Hub have, are sent as they are."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    structs = [{"bytes": JPEG, "path": "x.jpg"}, {"bytes": None, "path": "a.png"}]
    pq.write_table(pa.table({"q": ["1", "2"], "img": [PNG, b"no"], "hub": structs}), "pictures/in.parquet")
    result = run("pictures/in.parquet", "--image", "img", "--image", "hub", "-o", "out.parquet")
    assert contents(run)[0][:2] == [
        {"type": "image_url", "image_url": {"url": url("image/png", PNG)}},
        {"type": "image_url", "image_url": {"url": url("image/jpeg", JPEG)}},
    ], result.output
    first, second = pq.read_table("out.parquet").to_pylist()
    assert (first["img"], first["hub"], first["output"]) == (PNG, structs[0], "fine")
    assert second["error"].startswith("media_invalid: ")


def test_paths_of_data_without_a_folder(run, monkeypatch):
    """Those of standard input, and of data in a Python program, are relative to the working directory."""
    monkeypatch.chdir("pictures")
    shutil.copy("../batchmill.toml", "batchmill.toml")
    line = json.dumps({"q": "1", "img": "a.png"})
    flags = ("--model", "m", "--prompt", "See {q}", "--image", "img", "--format", "jsonl", "-o", "out.jsonl")
    result = CliRunner().invoke(cli, ["run", "-", *flags, "--data-dir", "data"], input=line, obj=Session())
    assert result.exit_code == 0, result.output
    job = batchmill.run(
        [{"q": "1", "img": "a.png"}], model="m", template="See {{ q }}", image_columns=["img"], data_dir="data",
        progress=False,
    )  # fmt: skip
    assert job.view.rows_ok == 1
    assert [each[0]["image_url"]["url"] for each in contents(run)] == [url("image/png", PNG)] * 2


def test_equal_requests_fold_by_content(run):
    """Rows with equal images under other names are one request; with other images they are not."""
    Path("pictures/copy.png").write_bytes(PNG)
    rows = [{"q": "", "img": name} for name in ("a.png", "copy.png", "b.jpg")]
    assert run(table(*rows), "--image", "img", "--dedupe").exit_code == 0
    assert len(run.bodies) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--image", "pic"), ["'pic'", "q, img"]),
        (("--image", "img", "--image", "img"), ["named twice"]),
        (("--image", "img", "--url", "/v1/embeddings"), ["--image", "/v1/embeddings"]),
        (("--document", "img", "--model", "vllm:folder"), ["vLLM reads no documents"]),
        (("--image", "img", "--model", "vllm:folder"), ["LlamaForCausalLM", "text alone"]),
        (("--audio", "img", "--model", "anthropic-batch:c"), ["image and document alone"]),
        (("--image", "img", "--model", "cohere-batch:c"), ["text alone"]),
    ],
)
def test_what_cannot_take_media_is_refused(run, flags, words, monkeypatch):
    """Before anything runs, with what to do."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    monkeypatch.setenv("COHERE_API_KEY", "k")
    Path("folder").mkdir()
    Path("folder/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    model = flags[flags.index("--model") + 1] if "--model" in flags else "m"
    flags = flags[: flags.index("--model")] if "--model" in flags else flags
    result = run(table({"q": "1", "img": "a.png"}), *flags, model=model)
    assert result.exit_code != 0
    assert all(word in result.output for word in words), result.output
    assert run.bodies == []


def test_a_retry_needs_a_model_that_takes_the_media(run, monkeypatch):
    """As the job did: what failed does not go to one that hears nothing."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    Path("pictures/s.wav").write_bytes(WAV)
    with open("batchmill.toml", "a") as file:
        file.write('[models.deaf]\nengine = "anthropic-batch"\nsource = "c"\n')
    ended = run(table({"q": "1", "say": "s.wav"}), "--audio", "say", "--fields", "a: int", "--schema-attempts", "1")
    assert ended.exit_code == 3, ended.output
    job = re.search(r"job_[0-9a-f]{20}", ended.output)[0]
    retried = CliRunner().invoke(cli, ["retry", job, "--model", "deaf", "--data-dir", "data"], obj=Session())
    assert retried.exit_code == 2 and "'deaf' takes no audio" in retried.output, retried.output


@pytest.mark.parametrize(("provider", "fake"), [("anthropic", AnthropicFake()), ("gemini", GeminiFake())])
def test_batches_of_providers_get_parts_of_their_own(run, monkeypatch, provider, fake):
    """From the cell to what the provider was sent, and back to the row; results hold no bytes. A URL is fetched when
    the file of the batch is written, and again after a failure; one without a content fails its row alone.
    """
    monkeypatch.setenv("BATCH_KEY", fake.key)
    fake.fates = []
    with beside(fake), web_files() as web:
        web.files["/b.jpg"] = WebFile(JPEG, failures=[503])
        with open("batchmill.toml", "a") as file:
            file.write(f'[models.b]\nengine = "{provider}-batch"\nsource = "s"\nbase_url = "{fake.base_url}"\n')
            file.write('api_key = "env:BATCH_KEY"\nengine_args = { poll_s = 0.01, poll_max_s = 0.02 }\n')
        allow(web)
        cells = ["a.png", "gone.png", f"{web.url}/b.jpg", f"{web.url}/gone.jpg"]
        result = run(
            table(*({"q": str(n), "img": cell} for n, cell in enumerate(cells, 1))), "--image", "img", model="b"
        )
    (job,) = fake.jobs.values()
    sent = json.dumps(job.rows)
    assert all(base64.b64encode(data).decode() in sent for data in (PNG, JPEG)) and len(job.rows) == 2, result.output
    good, bad, fetched, missing = results()
    assert fetched["output"] and json.loads(fetched["fetched"])[0][0] == blake3(JPEG).hexdigest()
    assert missing["error"].startswith("media_missing: there is nothing at ") and len(web.requests) == 3
    assert good == {"q": "1", "img": "a.png", "output": good["output"], "error": None} and good["output"]
    assert bad["error"].startswith("media_missing: ")

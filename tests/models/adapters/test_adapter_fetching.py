"""Adapters brought here from folders, a model hub and an object store."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from botocore.config import Config
from botocore.session import Session
from fakes.lora_files import CONFIG, WEIGHTS, lora_files, write_base, write_lora
from fakes.model_hub import TOKEN, ModelHub
from moto.server import ThreadedMotoServer

from batchmill.children.offload import Children
from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, TooLarge, Unavailable
from batchmill.models.adapters import fetching
from batchmill.models.adapters.fetching import FetchOrder, FetchReport, fetch, kind_of
from batchmill.models.worker_environment import FETCHERS
from batchmill.wire.adapter_bundles import FILES

BUCKET = "adapters-of-tests"


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with ModelHub() as hub:
        yield hub


@pytest.fixture
def at_hub(hub: ModelHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelHub:
    """The hub, and an environment whose children go there."""
    hub.repositories = {"org/good": {**lora_files(), "README.md": b"hello", "extra.bin": b"x" * 100}}
    hub.private, hub.gated, hub.claimed, hub.broken, hub.asked = set(), set(), {}, 0, []
    for name, value in {**hub.environment(), "HF_HOME": str(tmp_path / "hf")}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return hub


async def fetched(source: str, home: Path, token: str | None = None, base: str = "") -> FetchReport:
    """As the owner does it: in a child process."""
    order = msgspec.json.encode(FetchOrder(source, str(home), token, base, 512))
    children = Children(more=FETCHERS)
    try:
        answer = await children.offload("batchmill.models.adapters.fetching:run", order, lambda _: None)
    finally:
        await children.close()
    return msgspec.json.decode(answer, type=FetchReport)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/a/b", "folder"), ("./a", "folder"), ("~/a", "folder"), ("org/name", "hub"), ("name", "hub"),
        ("org/name@main", "hub"), ("s3://bucket/a/b", "objects"), ("gs://bucket", "objects"),
        ("az://container/x", "objects"),
    ],
)  # fmt: skip
def test_kinds_of_sources(source: str, kind: str) -> None:
    """A source is known by its form."""
    assert kind_of(source) == kind


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a b",
        "org/name/more",
        "http://host/x",
        "file:///etc",
        "s3://",
        "s3://key:secret@host/x",
        "s3://b/x?a=b",
        "s3://b/ours/../theirs",
        "gs://b/ours/./x",
        "s3://b/ours/%2e%2e/theirs",
        "org/name@../../x",
        "-x",
    ],
)
def test_no_sources(source: str) -> None:
    """Anything else is refused, and says what a source looks like."""
    with pytest.raises(InvalidInput) as caught:
        kind_of(source)
    assert caught.value.code == "invalid_source"


def test_a_folder(tmp_path: Path) -> None:
    """Only the two files of a LoRA are taken, and nobody writes to them any more; a second time costs nothing."""
    source = write_lora(tmp_path / "source", {**lora_files(), "notes.txt": b"x", "adapter_model.bin": b"pickle"})
    home = tmp_path / "adapters" / "one"
    first = fetch(str(source), home, token=None)
    assert names(tmp_path / "adapters") == [f"one/{CONFIG}", f"one/{WEIGHTS}"]
    assert first.bytes == sum(len(data) for data in lora_files().values())
    assert not (home / WEIGHTS).stat().st_mode & 0o222
    (source / WEIGHTS).unlink()
    assert fetch(str(source), home, token=None) == first


def _bad_places(folder: Path) -> dict[str, tuple[type[BatchmillError], str]]:
    outside = write_lora(folder / "outside")
    write_lora(folder / "pickle", {CONFIG: lora_files()[CONFIG], "adapter_model.bin": b"x"})
    write_lora(folder / "linked").joinpath(WEIGHTS).unlink()
    (folder / "linked" / WEIGHTS).symlink_to(outside / WEIGHTS)
    write_lora(folder / "pipe").joinpath(WEIGHTS).unlink()
    os.mkfifo(folder / "pipe" / WEIGHTS)
    os.truncate(write_lora(folder / "huge") / WEIGHTS, FILES[WEIGHTS] + 1)  # a hole: it takes no room
    (folder / "empty").mkdir()
    return {
        "pickle": (InvalidInput, "a pickle: loading it runs its author's code"),
        "linked": (InvalidInput, "is a link to a file outside of its folder"),
        "pipe": (InvalidInput, "is not a file"),
        "huge": (TooLarge, "is larger than the limit of 8,589,934,592 bytes"),
        "empty": (InvalidInput, f"there is no {CONFIG} at"),
        "nowhere": (InvalidInput, "there is no folder"),
    }


@pytest.mark.parametrize("name", ["pickle", "linked", "pipe", "huge", "empty", "nowhere"])
def test_bad_folders(tmp_path: Path, name: str) -> None:
    """What is not an adapter, leads elsewhere or is too large is refused, and leaves nothing."""
    kind, words = _bad_places(tmp_path)[name]
    with pytest.raises(kind) as caught:
        fetch(str(tmp_path / name), tmp_path / "adapters" / "one", token=None)
    assert words in caught.value.message
    assert names(tmp_path / "adapters") == []


def test_a_folder_with_a_link_inside(tmp_path: Path) -> None:
    """A link that stays in its folder is what it leads to."""
    source = write_lora(tmp_path / "source")
    (source / WEIGHTS).rename(source / "weights-1")
    (source / WEIGHTS).symlink_to("weights-1")
    home = tmp_path / "adapters" / "one"
    fetch(str(source), home, token=None)
    assert not (home / WEIGHTS).is_symlink()


async def test_a_hub(at_hub: ModelHub, tmp_path: Path) -> None:
    """Of a repository only what a LoRA needs is fetched, at one revision."""
    report = await fetched("org/good", tmp_path / "adapters" / "one", base=str(write_base(tmp_path / "base")))
    assert (report.rank, report.base, report.flaw) == (4, "org/tiny", "")
    assert names(tmp_path / "adapters") == [f"one/{CONFIG}", f"one/{WEIGHTS}"]
    commit = at_hub.commit("org/good")
    assert {line.partition("/resolve/")[2] for line in at_hub.asked if "/resolve/" in line} == {
        f"{commit}/{CONFIG}", f"{commit}/{WEIGHTS}",
    }  # fmt: skip
    again = await fetched(f"org/good@{commit}", tmp_path / "adapters" / "two")
    assert again.fetched.digest == report.fetched.digest


async def test_a_private_repository(at_hub: ModelHub, tmp_path: Path) -> None:
    """A token opens what is private; without it the hub is said to have none, and what to do."""
    at_hub.private.add("org/good")
    with pytest.raises(InvalidInput, match="has no org/good, or it is private: give a token that may read it"):
        await fetched("org/good", tmp_path / "adapters" / "one")
    report = await fetched("org/good", tmp_path / "adapters" / "one", TOKEN)
    assert report.rank == 4


@pytest.mark.parametrize(
    ("prepare", "kind", "words"),
    [
        (lambda hub: hub.gated.add("org/good"), AuthRefused, "is gated"),
        (lambda hub: hub.repositories.clear(), InvalidInput, "has no org/good"),
        (lambda hub: hub.claimed.update({WEIGHTS: FILES[WEIGHTS] + 1}), TooLarge, "is larger than"),
        (lambda hub: hub.repositories["org/good"].pop(CONFIG), InvalidInput, f"there is no {CONFIG} at org/good"),
        (
            lambda hub: hub.repositories.update({"org/good": {CONFIG: b"{}", "adapter_model.bin": b"x"}}),
            InvalidInput,
            "a pickle",
        ),
        (
            lambda hub: hub.repositories["org/good"].update({CONFIG: b"{}"}),
            InvalidInput,
            "this adapter cannot be served: peft_type is None",
        ),
        (lambda hub: setattr(hub, "broken", 1000), Unavailable, "could not be fetched from http://127.0.0.1"),
    ],
)
async def test_bad_repositories(at_hub: ModelHub, tmp_path: Path, prepare, kind, words: str) -> None:
    """What a hub does not have, does not give or should not be taken is refused in words, and leaves nothing."""
    prepare(at_hub)
    with pytest.raises(kind) as caught:
        await fetched("org/good", tmp_path / "adapters" / "one")
    assert words in caught.value.message
    assert names(tmp_path / "adapters") == []
    assert not any(line.endswith(".bin") for line in at_hub.asked)


async def test_offline(at_hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the network what the hub's cache holds is taken, and nothing is asked for."""
    code = f"from huggingface_hub import hf_hub_download as get; [get('org/good', name) for name in {list(FILES)}]"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True, timeout=60)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    at_hub.asked.clear()
    report = await fetched("org/good", tmp_path / "adapters" / "one")
    assert report.rank == 4
    with pytest.raises(InvalidInput, match="is not in the hub's cache"):
        await fetched("org/other", tmp_path / "adapters" / "two")
    assert at_hub.asked == []


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """botocore's own client, an empty bucket, and an environment whose children go there."""
    fields = {
        "AWS_ENDPOINT_URL": moto, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1", "NO_PROXY": "*",
    }  # fmt: skip
    for name, value in fields.items():
        monkeypatch.setenv(name, value)
    client = Session().create_client(
        "s3", region_name="us-east-1", endpoint_url=moto, aws_access_key_id="testing", aws_secret_access_key="testing",
        config=Config(proxies={}, s3={"addressing_style": "path"}),
    )  # fmt: skip
    client.create_bucket(Bucket=BUCKET)
    yield client
    for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=each["Key"])
    client.delete_bucket(Bucket=BUCKET)
    client.close()


async def test_an_object_store(bucket, tmp_path: Path) -> None:
    """The files below a prefix are fetched, those beside and below it are not."""
    for name, data in {**lora_files(), "notes.txt": b"x", "deep/er.txt": b"y"}.items():
        bucket.put_object(Bucket=BUCKET, Key=f"runs/7/{name}", Body=data)
    report = await fetched(f"s3://{BUCKET}/runs/7/", tmp_path / "adapters" / "one")
    assert report.rank == 4
    assert names(tmp_path / "adapters") == [f"one/{CONFIG}", f"one/{WEIGHTS}"]
    assert (tmp_path / "adapters" / "one" / WEIGHTS).read_bytes() == lora_files()[WEIGHTS]


async def test_bad_prefixes(bucket, tmp_path: Path) -> None:
    """A prefix without an adapter, with a pickle, or of no bucket is refused in words."""
    bucket.put_object(Bucket=BUCKET, Key=f"bad/{CONFIG}", Body=b"{}")
    bucket.put_object(Bucket=BUCKET, Key="bad/adapter_model.bin", Body=b"x")
    for place, words in (
        (f"s3://{BUCKET}/nothing", f"there is no {CONFIG} at"),
        (f"s3://{BUCKET}/bad", "a pickle"),
        ("s3://no-such-bucket-here/x", "no-such-bucket-here"),
    ):
        with pytest.raises(BatchmillError) as caught:
            await fetched(place, tmp_path / "adapters" / "one")
        assert words in caught.value.message
        assert isinstance(caught.value, InvalidInput)
    assert names(tmp_path / "adapters") == []


@pytest.mark.parametrize(("source", "package"), [("org/good", "huggingface_hub"), ("s3://b/x", "obstore")])
def test_a_missing_package(tmp_path: Path, source: str, package: str) -> None:
    """Where the package is not installed that it takes, what installs it is said."""
    code = (
        "import sys; from pathlib import Path; from batchmill.models.adapters.fetching import fetch\n"
        f"sys.modules[{package!r}] = None\n"
        f"fetch({source!r}, Path({str(tmp_path / 'one')!r}), token=None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"needs {package}: pip install 'batchmill[" in done.stderr.splitlines()[-1]


def test_two_fetch_at_once(tmp_path: Path) -> None:
    """Two that are fetched at the same time do not meet."""
    source = write_lora(tmp_path / "source")
    threads = [
        threading.Thread(target=fetch, args=(str(source), tmp_path / "adapters" / name), kwargs={"token": None})
        for name in ("one", "two")
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(names(tmp_path / "adapters")) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_two_fetches_of_one_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The child of an owner that was cut off goes on beside that of its successor, and disturbs it in nothing."""
    write_lora(tmp_path / "source")
    home, copy, count = tmp_path / "adapters" / "adapter_1", fetching._copy_folder, 0

    def beside(source: Path, staged: Path) -> None:
        nonlocal count
        count += 1
        if count == 1:
            if fails:  # while the other one has begun
                with pytest.raises(Unavailable):
                    fetch(str(source), home, token=None)
            else:
                fetch(str(source), home, token=None)
        elif fails:
            raise Unavailable("the source is gone")
        copy(source, staged)

    monkeypatch.setattr(fetching, "_copy_folder", beside)
    fetched = fetch(str(tmp_path / "source"), home, token=None)
    assert fetched == fetching.measure(home) and count == 2
    assert names(tmp_path / "adapters") == [f"adapter_1/{name}" for name in sorted(FILES)]
    assert list((tmp_path / "adapters" / "staging").iterdir()) == []

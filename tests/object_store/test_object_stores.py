"""The promises of an object store, kept in memory, in a folder and in S3; and what else an S3 store must bear."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from contract.object_store_suite import LARGE, ObjectStoreSuite
from fakes.faulty_objects import FaultyObjects, faulty_objects
from fakes.s3_server import bucket_client, put_many, s3_environment, s3_server
from fakes.terms import SetTerm

from batchmill.errors import AuthRefused, Conflict, DatabaseUnavailable, InvalidConfig, InvalidInput, Unavailable
from batchmill.object_store.store import ObjectStore
from batchmill.object_store.urls import is_object_url, open_store, parse_url

BUCKET = "contract"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def faulty(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    with ExitStack() as stack:
        stack.enter_context(bucket_client(s3, BUCKET))
        plan = stack.enter_context(faulty_objects(s3))
        for name, value in s3_environment(plan.url).items():
            monkeypatch.setenv(name, value)
        yield plan


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def impatient(faulty: FaultyObjects, pauses: list[float]) -> ObjectStore:
    """A store that pauses for no time."""
    return ObjectStore(parse_url(f"s3://{BUCKET}/part"), pause=pauses.append)


class TestMemory(ObjectStoreSuite):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return open_store("memory:///")


class TestFolder(ObjectStoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"file://{tmp_path}/new folder")

    def test_files_lie_in_the_folder(self, store: ObjectStore, tmp_path: Path):
        """An object of a folder is a file."""
        store.put("a/b", b"x")
        assert (tmp_path / "new folder" / "a" / "b").read_bytes() == b"x"

    def test_replacing_what_was_seen(self, store: ObjectStore):
        """A folder has no such condition, and says so."""
        seen = store.put("k", b"first")
        with pytest.raises(InvalidInput, match="cannot do this"):
            store.put("k", b"second", replaced=seen)
        assert store.get("k", size_max=9) == b"first"


class TestS3(ObjectStoreSuite):
    @pytest.fixture
    def store(self, faulty: FaultyObjects) -> ObjectStore:
        return open_store(f"s3://{BUCKET}/below/here")


TRANSIENT = ("slow_down", "reset", "truncated", "short")


def test_reads_are_tried_again(impatient: ObjectStore, faulty: FaultyObjects, pauses: list[float]):
    """A read that S3 or the network fails is tried again, and never returns fewer bytes than it was asked for."""
    impatient.put("k", b"content")
    info = impatient.head("k")
    for fault in TRANSIENT:
        faulty.fail("GET", fault)
        assert bytes(impatient.get_range(info, 0, 7)) == b"content"
    faulty.fail("GET", *TRANSIENT)
    assert bytes(impatient.get_range(info, 1, 6)) == b"onten"
    assert len(pauses) == 2 * len(TRANSIENT)
    assert all(0 < each <= 5 for each in pauses)
    faulty.fail("HEAD", "reset")
    assert impatient.head("k") == info


def test_writes_are_tried_again(impatient: ObjectStore, faulty: FaultyObjects):
    """A write that failed is sent again; one whose reply was lost is found, and counts once."""
    for number, fault in enumerate(("slow_down", "reset", "lost_reply")):
        faulty.fail("PUT", fault)
        impatient.put(f"k{number}", b"content")
        assert impatient.get(f"k{number}", size_max=7) == b"content"
    assert faulty.count("PUT") == 6


def test_no_attempt_writes_after_the_term(faulty: FaultyObjects):
    """Who may write no more sends no further request that changes an object: no second attempt of a put, no next part
    of an upload, no removal. It reads all the same.
    """
    left = [math.inf]

    def checked() -> float:
        left[0] -= 1
        return left[0] + 1

    store = ObjectStore(parse_url(f"s3://{BUCKET}/term"), pause=lambda _: None, term=SetTerm(checked))
    store.put("there", b"content")
    left[0] = 1  # for the first attempt
    faulty.fail("PUT", "slow_down")
    with pytest.raises(DatabaseUnavailable):
        store.put("late", b"content")
    left[0] = 0
    for write in (lambda: store.put("late", b"x"), lambda: store.delete("there"), lambda: store.delete("there", "b")):
        with pytest.raises(DatabaseUnavailable):
            write()
    assert (faulty.count("PUT"), faulty.count("DELETE"), faulty.count("POST")) == (2, 0, 0)
    assert [info.key for info in store.list()] == ["there"]
    assert store.get("there", size_max=7) == b"content"


def test_no_part_is_uploaded_after_the_term(faulty: FaultyObjects, tmp_path: Path):
    """An upload of several parts ends with the first one that may not be written, and leaves no object."""
    checks: list[None] = []

    def checked() -> float:
        checks.append(None)
        return 3.0 - len(checks)

    (tmp_path / "large").write_bytes(LARGE)
    store = ObjectStore(parse_url(f"s3://{BUCKET}/term"), pause=lambda _: None, term=SetTerm(checked))
    with pytest.raises(DatabaseUnavailable):
        store.put_file("large", tmp_path / "large")
    assert store.find("large") is None
    assert len(checks) == 4  # before the upload, one part, the next one, and for the reason


def test_a_lost_reply_hides_no_conflict(impatient: ObjectStore, faulty: FaultyObjects):
    """Where another writer was first, a write whose reply is lost ends as a conflict."""
    impatient.put("k", b"theirs!")
    faulty.fail("PUT", "lost_reply")
    with pytest.raises(Conflict):
        impatient.put("k", b"content")
    assert impatient.get("k", size_max=7) == b"theirs!"


def test_a_replacement_whose_reply_is_lost(impatient: ObjectStore, faulty: FaultyObjects):
    """It is found; where another writer was first, it ends as a conflict."""
    seen = impatient.put("k", b"first")
    faulty.fail("PUT", "lost_reply")
    second = impatient.put("k", b"second", replaced=seen)
    assert second.etag == impatient.head("k").etag
    faulty.fail("PUT", "lost_reply")
    with pytest.raises(Conflict):
        impatient.put("k", b"third", replaced=seen)
    assert impatient.get("k", size_max=9) == b"second"


def test_large_files_bear_faults(impatient: ObjectStore, faulty: FaultyObjects, tmp_path: Path):
    """Parts of an upload are sent again, each by itself."""
    (tmp_path / "large").write_bytes(LARGE)
    faulty.fail("PUT", "slow_down", "reset")
    faulty.fail("POST", "slow_down")
    impatient.put_file("large", tmp_path / "large")
    assert impatient.get("large", size_max=len(LARGE)) == LARGE


def test_few_requests_remove_many(impatient: ObjectStore, faulty: FaultyObjects):
    """A thousand objects are removed with one request, which is tried again."""
    for number in range(20):
        impatient.put(f"k{number}", b"x")
    faulty.fail("POST", "slow_down", "lost_reply")
    impatient.delete(*(f"k{number}" for number in range(20)))
    assert list(impatient.list()) == []
    assert faulty.count("POST") == 3 and faulty.count("DELETE") == 0


def test_a_server_that_refuses_to_remove_many(impatient: ObjectStore, faulty: FaultyObjects):
    """Objects are then removed one by one, each with a request of its own."""
    for number in range(3):
        impatient.put(f"k{number}", b"x")
    faulty.fail("POST", "not_implemented")
    impatient.delete(*(f"k{number}" for number in range(3)))
    assert list(impatient.list()) == []
    assert faulty.count("POST") + faulty.count("DELETE") == 1 + 3


def test_what_a_list_looks_at(s3: str, faulty: FaultyObjects):
    """A list begins at its prefix, ends behind it, and what it looks at has a limit."""
    with bucket_client(s3, "listed"):
        put_many("listed", [*(f"{first}{number:04}" for first in "ab" for number in range(1001)), "c"])
        store = ObjectStore(parse_url("s3://listed"))
        assert len(list(store.list("c"))) == 1
        assert len(list(store.list("b0999"))) == 1
        before = len(faulty.requests)
        assert len(list(store.list("a01"))) == 100
        assert len(list(store.list("bb"))) == 0
        assert len(faulty.requests) - before <= 4
        with pytest.raises(InvalidInput) as caught:
            list(store.list("z", listed_max=1000))
        assert caught.value.code == "too_many_objects"


def test_attempts_end(faulty: FaultyObjects):
    """A store that stays down is Unavailable after the time for attempts, with the URL of the object."""
    store = ObjectStore(parse_url(f"s3://{BUCKET}"), retry_s=0.3, pause=lambda _: None)
    faulty.always = {"GET": "slow_down", "HEAD": "slow_down", "PUT": "reset"}
    for call in (lambda: store.head("k"), lambda: store.put("k", b"x"), lambda: list(store.list())):
        with pytest.raises(Unavailable, match=f"s3://{BUCKET}") as caught:
            call()
        assert caught.value.code == "store_unavailable"


def test_expired_credentials_are_fetched_anew(impatient: ObjectStore, faulty: FaultyObjects, monkeypatch):
    """Credentials that expire are fetched once more; if those are refused too, the error says what to do."""
    impatient.put("k", b"content")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    faulty.fail("GET", "expired")
    assert impatient.get("k", size_max=7) == b"content"
    assert "Credential=renewed/" in faulty.requests[-1][2]["authorization"]
    for fault in ("expired", "denied"):
        faulty.always = {"GET": fault}
        with pytest.raises(AuthRefused, match=f"refused s3://{BUCKET}/part/k: .*give credentials") as caught:
            impatient.get("k", size_max=7)
        assert caught.value.code == "auth_error"
        faulty.always = {}
        assert impatient.get("k", size_max=7) == b"content"


def test_refusals(impatient: ObjectStore, faulty: FaultyObjects, monkeypatch: pytest.MonkeyPatch):
    """What no further attempt would change fails at once, in words."""
    faulty.fail("GET", "other_region")
    with pytest.raises(InvalidInput, match="set AWS_REGION"):
        list(impatient.list())
    with pytest.raises(InvalidInput, match="there is no bucket s3://no-such-bucket"):
        list(open_store("s3://no-such-bucket").list())
    count = len(faulty.requests)
    with pytest.raises(InvalidInput):
        impatient.head("nothing")
    assert len(faulty.requests) == count + 1


def test_racing_writers(impatient: ObjectStore):
    """Of writers of one name exactly one wins."""
    won: list[int] = []

    def write(number: int) -> None:
        try:
            impatient.put("k", b"%d" % number)
            won.append(number)
        except Conflict:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert impatient.get("k", size_max=10) == b"%d" % won[0]
    assert len(won) == 1


def test_profiles(faulty: FaultyObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without credentials in the environment those of the named profile are used, else those of the default one."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = fromdefault\naws_secret_access_key = x\n"
        "[team]\naws_access_key_id = fromteam\naws_secret_access_key = x\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    open_store(f"s3://{BUCKET}").put("k", b"x")
    assert "Credential=testing/" in faulty.requests[-1][2]["authorization"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    open_store(f"s3://{BUCKET}").put("k2", b"x")
    assert "Credential=fromteam/" in faulty.requests[-1][2]["authorization"]
    monkeypatch.delenv("AWS_PROFILE")
    open_store(f"s3://{BUCKET}").put("k3", b"x")
    assert "Credential=fromdefault/" in faulty.requests[-1][2]["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "unknown")
    with pytest.raises(AuthRefused, match="unknown"):
        open_store(f"s3://{BUCKET}")


def test_urls():
    """A URL names a bucket and a key, and nothing secret."""
    url = parse_url("s3://bucket/a/b c%20.jsonl")
    assert (url.scheme, url.bucket, url.key, str(url)) == (
        "s3", "bucket", "a/b c%20.jsonl", "s3://bucket/a/b c%20.jsonl",
    )  # fmt: skip
    assert parse_url("gs://bucket").key == ""
    assert [is_object_url(each) for each in ("s3://b/k", "az://b", "rows.jsonl", "s3:x", "http://h/x")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    for text in ("s3://", "s3:///k", "ftp://h/k", "s3://key:secret@bucket/k", "s3://b//k", "s3://b/../k", "file://h/k"):
        with pytest.raises(InvalidInput) as caught:
            parse_url(text)
        assert caught.value.code == "invalid_url"


def test_what_is_not_installed():
    """Without obstore the error says what installs it."""
    code = "import sys; sys.modules['obstore'] = None\nfrom batchmill.object_store.urls import open_store\nopen_store('s3://b')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert "needs obstore: pip install 'batchmill[objects]'" in done.stderr.splitlines()[-1]


def test_stores_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch):
    """A store that lacks a setting is refused in words when it is opened."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidConfig, match="az://container cannot be opened: .*Account"):
        open_store("az://container")

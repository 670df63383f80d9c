"""Downloads of URLs: resumed, bounded and guarded."""

import asyncio

import msgspec
import pytest
from fakes.web_files import WebFile, web_files

from batchmill.errors import InvalidDataset, InvalidInput, StorageFailed, TooLarge
from batchmill.models import downloads
from batchmill.models.addresses import Private, read_private
from batchmill.models.downloads import ATTEMPTS_MAX, REDIRECTS_MAX, Downloaded, Downloads

BODY = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def server():
    with web_files() as web:
        yield web


@pytest.fixture
def web(server):
    server.files.clear()
    server.requests.clear()
    return server


@pytest.fixture
def target(tmp_path):
    return tmp_path / "file"


def fetch(url, target, *, private=None, bytes_max=2**30, time_s=60) -> Downloaded:
    def check_size(size_bytes):
        if size_bytes > bytes_max:
            raise TooLarge("too large", code="download_too_large")

    async def run():
        downloads = Downloads(private or read_private(["127.0.0.1"]), pause=no_pause)
        try:
            return await downloads.fetch(url, target, check_size, lambda *_: None, time_s=time_s)
        finally:
            downloads.close()

    return asyncio.run(run())


async def no_pause(_seconds):
    """The next attempt follows at once."""


def test_a_file_is_read_once(web, target):
    """Another call finds it complete and asks nothing."""
    web.files["/a"] = WebFile(BODY, headers={"Content-Type": "text/html"})
    found = fetch(f"{web.url}/a", target)
    assert target.read_bytes() == BODY and found.etag == '"1"' and found.size_bytes == len(BODY)
    assert fetch(f"{web.url}/a", target) == found
    assert web.requests == [("/a", None)]


def test_a_cut_reply_is_resumed(web, target):
    web.files["/a"] = WebFile(BODY, cuts=[1000, 5000])
    fetch(f"{web.url}/a", target)
    assert target.read_bytes() == BODY
    assert web.requests == [("/a", None), ("/a", "bytes=1000-"), ("/a", "bytes=6000-")]


def test_the_rest_is_fetched_after_a_crash(web, target):
    """What is on the disk is not fetched again, if its ETag is the server's."""
    web.files["/a"] = WebFile(BODY, cuts=[1000] + [0] * ATTEMPTS_MAX)
    with pytest.raises(StorageFailed, match="the reply was cut off"):
        fetch(f"{web.url}/a", target)
    web.requests.clear()
    fetch(f"{web.url}/a", target)
    assert target.read_bytes() == BODY and web.requests == [("/a", "bytes=1000-")]


def test_it_begins_anew_after_a_start_of_the_machine(web, target, monkeypatch):
    """A loss of power may have taken bytes from the middle, which the size does not show."""
    web.files["/a"] = WebFile(BODY, cuts=[1000] + [0] * ATTEMPTS_MAX)
    with pytest.raises(StorageFailed):
        fetch(f"{web.url}/a", target)
    target.write_bytes(bytes(target.stat().st_size))
    monkeypatch.setattr(downloads, "boot_id", lambda: "another/1")
    web.requests.clear()
    fetch(f"{web.url}/a", target)
    assert target.read_bytes() == BODY and web.requests == [("/a", None)]


@pytest.mark.parametrize("kind", ["changed", "weak", "without", "no ranges", "shorter", "lying"])
def test_it_begins_anew_where_it_cannot_be_resumed(web, target, kind):
    """Bytes of two contents are never in one file."""
    etag = {"weak": 'W/"1"', "without": ""}.get(kind, '"1"')
    web.files["/a"] = WebFile(BODY, etag, cuts=[1000] + [0] * ATTEMPTS_MAX)
    with pytest.raises(StorageFailed):
        fetch(f"{web.url}/a", target)
    body = BODY[:500] if kind == "shorter" else BODY[::-1]
    new_etag = '"2"' if kind in ("changed", "lying") else etag
    web.files["/a"] = WebFile(body, new_etag, has_ranges=kind != "no ranges", ignores_if_range=kind == "lying")
    fetch(f"{web.url}/a", target)
    assert target.read_bytes() == body


def test_a_body_that_is_shorter_than_its_length_is_refused(web, target):
    web.files["/a"] = WebFile(BODY, etag="", cuts=[1000] * ATTEMPTS_MAX)
    with pytest.raises(StorageFailed, match=f"cut off, or was not valid HTTP, {ATTEMPTS_MAX} times") as error:
        fetch(f"{web.url}/a", target)
    assert error.value.code == "download_failed" and len(web.requests) == ATTEMPTS_MAX


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(404, "no_such_url", "404"), (410, "no_such_url", "410"), (401, "url_refused", "needs no login"),
     (403, "url_refused", "needs no login"), (451, "url_refused", "451"), (304, "url_refused", "304")],
)  # fmt: skip
def test_a_refusal_is_final(web, target, status, code, words):
    web.files["/a?signature=1"] = WebFile(status=status)
    with pytest.raises(InvalidDataset, match=words) as error:
        fetch(f"{web.url}/a?signature=1", target)
    assert error.value.code == code and len(web.requests) == 1 and "signature" not in error.value.message


def test_what_may_pass_is_tried_again(web, target):
    web.files["/a"] = WebFile(status=503)
    with pytest.raises(StorageFailed, match="answers 503, 5 times"):
        fetch(f"{web.url}/a", target)


def test_an_endless_body_ends_at_the_limit(web, target):
    web.files["/a"] = WebFile(is_endless=True)
    with pytest.raises(TooLarge):
        fetch(f"{web.url}/a", target, bytes_max=1_000_000)
    assert target.stat().st_size <= 1_000_000
    web.files["/b"] = WebFile(BODY)
    fetch(f"{web.url}/b", target, bytes_max=len(BODY))
    target.unlink()
    with pytest.raises(TooLarge):
        fetch(f"{web.url}/b", target, bytes_max=len(BODY) - 1)
    assert not target.exists()


def test_redirects_are_followed_and_checked(web, target):
    """Each is checked as the first URL is: one to an address that is not allowed is refused."""
    web.files["/a"] = WebFile(status=302, headers={"Location": "/b"})
    web.files["/b"] = WebFile(BODY)
    fetch(f"{web.url}/a", target)
    assert target.read_bytes() == BODY
    port = web.url.rpartition(":")[2]
    for location in (
        "http://169.254.169.254/latest/",
        "file:///etc/passwd",
        f"http://localhost:{port}/b",
        "http://a@b/",
    ):
        web.files["/c"] = WebFile(status=307, headers={"Location": location})
        with pytest.raises(InvalidInput) as error:
            fetch(f"{web.url}/c", target)
        assert error.value.code == "url_not_allowed", location
    web.files["/d"] = WebFile(status=301, headers={"Location": "/d"})
    web.requests.clear()
    with pytest.raises(InvalidDataset, match="more than 5 times"):
        fetch(f"{web.url}/d", target)
    assert len(web.requests) == REDIRECTS_MAX + 1
    web.files["/e"] = WebFile(status=301, headers={"Location": "https://[::1"})
    with pytest.raises(InvalidDataset, match="redirected to what is no URL"):
        fetch(f"{web.url}/e", target)


def test_a_body_whose_end_is_not_told_is_refused(web, target):
    """A reply that was cut off would look whole."""
    web.files["/a"] = WebFile(BODY, has_length=False)
    with pytest.raises(InvalidDataset, match="does not say where") as error:
        fetch(f"{web.url}/a", target)
    assert error.value.code == "url_refused"


def test_private_addresses_are_refused(web, target):
    with pytest.raises(InvalidInput, match="private") as error:
        fetch(f"{web.url.replace('http', 'https')}/a", target, private=Private())
    assert error.value.code == "url_not_allowed" and not web.requests
    with pytest.raises(InvalidInput, match="plain http is allowed only for hosts"):
        fetch("http://example.com/a", target)


def test_a_body_that_is_packed_without_its_name_is_refused(web, target):
    web.files["/a.jsonl"] = WebFile(b"x", headers={"Content-Encoding": "gzip"})
    web.files["/a.jsonl.gz"] = WebFile(b"x", headers={"Content-Encoding": "gzip"})
    with pytest.raises(InvalidDataset, match="packed"):
        fetch(f"{web.url}/a.jsonl", target)
    fetch(f"{web.url}/a.jsonl.gz", target)
    assert target.read_bytes() == b"x"


def test_a_damaged_record_begins_anew(web, target):
    web.files["/a"] = WebFile(BODY)
    record = target.with_name("file.download")
    for content in (b"{", msgspec.json.encode(Downloaded(f"{web.url}/other", '"1"', 3, is_complete=True))):
        record.write_bytes(content)
        target.write_bytes(b"abc")
        fetch(f"{web.url}/a", target)
        assert target.read_bytes() == BODY


def test_a_download_ends_in_time(web, target):
    web.files["/a"] = WebFile(BODY)
    with pytest.raises(StorageFailed, match="was not downloaded in time") as error:
        fetch(f"{web.url}/a", target, time_s=0)
    assert error.value.code == "download_failed"

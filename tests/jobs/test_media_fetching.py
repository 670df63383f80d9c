"""URLs in cells of media columns: fetched through the guard, bounded in bytes, alone and together."""

import hashlib

import pytest
from fakes.web_files import WebFile, web_files

from batchmill.errors import InvalidDataset, InvalidRow, OverQuota, StorageFailed
from batchmill.jobs.intake import media_fetching
from batchmill.jobs.intake.fetching import Bounds
from batchmill.jobs.intake.media_fetching import UrlMedia


def codes(found) -> list[str]:
    return [each.code if isinstance(each, InvalidRow) else "" for each in found.values()]


def test_each_url_has_its_file_or_its_fault(tmp_path):
    """One that is too long, however it is sent, or that leads to a private address, is the fault of its rows alone."""
    with web_files() as web:
        web.files |= {
            "/a": WebFile(b"a"), "/long": WebFile(b"x" * 101), "/endless": WebFile(is_endless=True),
            "/away": WebFile(status=302, headers={"Location": "http://127.0.0.2:9/"}),
        }  # fmt: skip
        media = UrlMedia([web.host], Bounds(None, ""), 1000)
        urls = [f"{web.url}/{name}" for name in ("a", "long", "endless", "away", "gone")]
        found = media.fetch([*urls, "http://169.254.169.254/"], tmp_path, 100)
        assert codes(found) == [
            "", "media_too_large", "media_too_large", "media_not_allowed", "media_missing", "media_not_allowed",
        ]  # fmt: skip
        assert found[urls[0]].read_bytes() == b"a"
        assert [path.name for path in tmp_path.iterdir()] == [found[urls[0]].name]
        before = len(web.requests)
        assert media.fetch(urls[:2], tmp_path, 100) == {url: found[url] for url in urls[:2]}
        assert len(web.requests) == before


def test_all_of_them_together_are_bounded(tmp_path):
    """By `limits.download_bytes_max`, and by what is left of a project's disk quota: then nothing of the job runs."""
    with web_files() as web:
        web.files |= {f"/{n}": WebFile(b"x" * 60) for n in range(2)}
        urls = [f"{web.url}/{n}" for n in range(2)]
        with pytest.raises(InvalidDataset, match="limits.download_bytes_max"):
            UrlMedia([web.host], Bounds(None, ""), 100).fetch(urls, tmp_path, 100)
        for path in tmp_path.iterdir():
            path.unlink()
        with pytest.raises(OverQuota, match="full"):
            UrlMedia([web.host], Bounds(100, "full"), 1000).fetch(urls, tmp_path, 100)


def test_another_attempt_fetches_again(tmp_path):
    """Sealing that begins anew has removed the files: they are neither known any more, nor counted twice."""
    with web_files() as web:
        web.files["/a"] = WebFile(b"x" * 60)
        media, url = UrlMedia([web.host], Bounds(None, ""), 100), f"{web.url}/a"
        for _ in range(2):
            media.begin()
            path = media.fetch([url], tmp_path, 100)[url]
            assert path.read_bytes() == b"x" * 60
            path.unlink()


def test_a_server_that_does_not_answer_is_its_rows_fault(tmp_path, monkeypatch):
    """Its message says what to do; a broken disk is no fault of the rows."""
    monkeypatch.setattr(media_fetching, "URL_S", 0.0)
    with web_files() as web:
        web.files["/a"] = WebFile(b"a")
        (found,) = UrlMedia([web.host], Bounds(None, ""), 100).fetch([f"{web.url}/a"], tmp_path, 100).values()
    assert found.code == "media_missing" and found.message.endswith(
        "; run the row in a new job when the server answers"
    )
    assert "resume" not in found.message
    monkeypatch.setattr(media_fetching, "URL_S", 30.0)
    with web_files() as web, pytest.raises(StorageFailed, match="cannot be written"):
        web.files["/a"] = WebFile(b"a")
        (tmp_path / hashlib.sha256(f"{web.url}/a".encode()).hexdigest()).symlink_to("elsewhere")
        UrlMedia([web.host], Bounds(None, ""), 100).fetch([f"{web.url}/a"], tmp_path, 100)

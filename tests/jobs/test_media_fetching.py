"""URLs in cells of media columns: fetched through the guard, bounded in bytes, alone and together."""

import pytest
from fakes.web_files import WebFile, web_files

from batchmill.errors import InvalidDataset, InvalidRow, OverQuota
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

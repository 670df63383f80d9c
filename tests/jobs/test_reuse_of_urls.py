"""Whether URLs lead to what they led to: servers that do not answer hold no lookup up."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3
from fakes.web_files import WebFile, web_files

from batchmill.jobs.intake.reuse_media import AT_ONCE, SILENT_MAX, EarlierMedia
from batchmill.types import DatasetSpec, FetchedPart
from batchmill.wire.rows.forms import FETCHED
from batchmill.wire.rows.rendered_rows import MediaPart, with_media

PNG = b"\x89PNG\r\n\x1a\npixels"


def are_same(media: EarlierMedia, *urls: str) -> list[bool]:
    fetched = msgspec.json.encode([FetchedPart(blake3(PNG).hexdigest())]).decode()
    lines = [msgspec.json.encode({FETCHED: fetched})] * len(urls)
    return media.are_same(lines, [with_media(b"{}", [MediaPart("image", url=url, column="i")]) for url in urls])


@pytest.fixture
def web():
    with web_files() as web:
        web.files = {"/good": WebFile(PNG), "/other": WebFile(b"other"), "/busy": WebFile(status=503)}
        yield web


@pytest.fixture
def media(web) -> EarlierMedia:
    return EarlierMedia(DatasetSpec([], private_hosts=[web.host]))


def test_a_server_that_does_not_answer_is_asked_no_more(web, media):
    """However many rows name it."""
    assert are_same(media, f"{web.url}/good", f"{web.url}/busy") == [True, False]
    urls = [f"{web.url}/busy?{number}" for number in range(200)]
    web.files |= {url.removeprefix(web.url): WebFile(status=503) for url in urls}
    before = len(web.requests)
    assert not any(are_same(media, *urls)) and not any(are_same(media, *(f"{url}0" for url in urls)))
    assert len(web.requests) - before <= SILENT_MAX + AT_ONCE
    assert are_same(media, f"{web.url}/other") == [False]
    (words,) = media.unasked()
    assert f"rows with URLs of {web.url}, which" in words


def test_asking_ends(web, media, monkeypatch):
    """Rows whose servers were not asked in time run."""
    assert are_same(media, f"{web.url}/good") == [True] and media.unasked() == []
    monkeypatch.setattr(media, "_left_s", 0.0)
    assert are_same(media, f"{web.url}/other", f"{web.url}/good") == [False, True]
    assert "were not asked about" in media.unasked()[0]

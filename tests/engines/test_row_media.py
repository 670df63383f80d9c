"""Media of rows that are about to be sent: URLs are fetched through the guard, in bounded memory and time."""

from __future__ import annotations

import asyncio
import random
import socket
from base64 import b64encode
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from blake3 import blake3
from fakes.held_clock import HeldClock
from fakes.web_files import WebFile, web_files

from batchmill.engines import media_urls
from batchmill.engines.media_hosts import FAILED_MAX, HOSTS_MAX, PAUSE_MAX_S, PAUSE_S, SILENT_S, MediaHosts
from batchmill.engines.media_places import Places
from batchmill.engines.row_media import READS_MAX, RowMedia
from batchmill.errors import InvalidRow
from batchmill.models import secrets
from batchmill.types import FetchedPart, LoadedPart, MediaBounds, MediaColumn, Provision, Row
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.rows.rendered_rows import MediaPart, with_media

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
LIMIT = 1024 * 1024


def row_of(*urls: str, number: int = 0) -> Row:
    parts = [MediaPart("image", url=url, column="img") for url in urls]
    return Row(number, number, with_media(b'{"q":"?"}', parts), TableForm("{q}", media=[MediaColumn("image", "img")]))


def media_in(row: Row) -> tuple[LoadedPart, ...] | None:
    return row.media


@pytest.fixture
def web():
    with web_files() as web:
        secrets.take(Provision(private_hosts=[web.host]))
        yield web
        secrets.take(Provision())


@asynccontextmanager
async def loader(clock: HeldClock | None = None, *, bytes_max: int = LIMIT, attempts_max: int = 3, calls=lambda: 0):
    media = RowMedia(
        calls,
        attempts_max=attempts_max,
        clock=clock or HeldClock(),
        jitter=random.Random(1).random,
        bytes_max=bytes_max,
    )
    try:
        yield media
    finally:
        await media.close()


async def code_of(media: RowMedia, row: Row) -> str:
    """What becomes of a row: the code of its error, or nothing."""
    loading = media.begin(row)
    try:
        parts = await loading.make(media_in)
    except InvalidRow as error:
        return error.code
    finally:
        loading.close()
    assert parts == (LoadedPart("image/png", b64encode(PNG).decode()),) and row.media is None
    return ""


async def test_what_a_url_leads_to_decides_what_becomes_of_its_row(web):
    """What another attempt may change is tried again and then a fault that a retry reaches; the rest is one at once."""
    ten_gigabytes = WebFile(PNG, claimed_bytes=10**10)
    cases = {
        "good": (WebFile(PNG), "", 1),
        "later": (WebFile(PNG, failures=[503, 500]), "", 3),
        "cut": (WebFile(PNG, cuts=[4]), "", 2),
        "down": (WebFile(status=503), "media_unavailable", 3),
        "always-cut": (WebFile(PNG, cuts=[4, 4, 4]), "media_unavailable", 3),
        "gone": (WebFile(status=410), "media_missing", 1),
        "secret": (WebFile(status=403), "media_missing", 1),
        "page": (WebFile(b"<html>"), "media_invalid", 1),
        "claims": (ten_gigabytes, "media_too_large", 1),
        "endless": (WebFile(is_endless=True), "media_too_large", 1),
        "packed": (WebFile(PNG, headers={"Content-Encoding": "gzip"}), "media_missing", 1),
        "open": (WebFile(PNG, has_length=False), "media_missing", 1),
        "away": (WebFile(status=302, headers={"Location": "http://127.0.0.2:9/"}), "media_not_allowed", 1),
        "file": (WebFile(status=302, headers={"Location": "file:///etc/passwd"}), "media_not_allowed", 1),
        "loop": (WebFile(status=302, headers={"Location": "/loop"}), "media_missing", 6),
        "moved": (WebFile(status=301, headers={"Location": "/good"}), "", 1),
        "tomorrow": (WebFile(status=503, headers={"Retry-After": "86400"}), "media_unavailable", 1),
    }
    web.files = {f"/{name}": file for name, (file, _, _) in cases.items()}
    async with loader() as media:
        found = {name: await code_of(media, row_of(f"{web.url}/{name}")) for name in cases}
        assert found == {name: code for name, (_, code, _) in cases.items()}
        asked = [path for path, _ in web.requests]
        assert {name: asked.count(f"/{name}") for name in cases} == {
            name: count + (name == "good") for name, (_, _, count) in cases.items()
        }
        for url in ("http://169.254.169.254/", "https://127.0.0.2/", "https://[::1]/", "http://x.example/a.png"):
            assert await code_of(media, row_of(url)) == "media_not_allowed"
        assert not media._held and not media._waiting


async def test_messages_hold_no_secrets_and_are_text(web):
    """Whatever a server sends and a URL holds: a message is stored as JSON, and read by others."""
    cases = {
        "/packed": WebFile(PNG, headers={"Content-Encoding": "gz\xff"}),
        "/open": WebFile(PNG, has_length=False, headers={"Transfer-Encoding": "identity"}),
        "/login": WebFile(status=302, headers={"Location": "https://me:hidden@x.example/?sig=hidden"}),
        "/cloud": WebFile(status=302, headers={"Location": "http://169.254.169.254/?sig=hidden"}),
        "/broken": WebFile(status=302, headers={"Location": "http://me:hidden@[::1"}),
    }
    web.files = {f"{path}?sig=hidden": file for path, file in cases.items()}
    urls = [f"{web.url}{path}?sig=hidden" for path in cases]
    urls += ["https://me:hidden@x.example/a.png", "http://x.example/?sig=hidden", "https://127.0.0.2/?sig=hidden"]
    async with loader() as media:
        for url in urls:
            loading = media.begin(row_of(url))
            with pytest.raises(InvalidRow) as refused:
                await loading.make(media_in)
            loading.close()
            assert "hidden" not in refused.value.message and refused.value.message.encode(), url


async def test_another_attempt_waits_as_long_as_the_server_asks(web):
    """Or longer and longer; a server that does not exist is asked again too."""
    clock = HeldClock()
    web.files["/busy"] = WebFile(status=429, headers={"Retry-After": "7"})
    async with loader(clock) as media:
        assert await code_of(media, row_of(f"{web.url}/busy")) == "media_unavailable"
        assert clock.slept == [7.0, 7.0]
        with socket.socket() as closed:
            closed.bind((web.host, 0))
            url = f"http://{web.host}:{closed.getsockname()[1]}/a.png"
            assert await code_of(media, row_of(url)) == "media_unavailable"
        assert len(clock.slept) == 4 and all(0 < each < 2 for each in clock.slept[2:])


async def test_a_server_that_sends_nothing_is_given_up(web, monkeypatch):
    """The time of an attempt is bounded, whatever trickles in."""
    monkeypatch.setattr(media_urls, "ATTEMPT_S", 0.0)
    web.files["/a"] = WebFile(PNG)
    async with loader() as media:
        assert await code_of(media, row_of(f"{web.url}/a")) == "media_unavailable"


async def test_rows_that_share_a_url_fetch_it_once(web):
    """Also those that want it while it is fetched; after a minute it is fetched again."""
    clock = HeldClock()
    web.files["/a"] = WebFile(PNG)
    async with loader(clock) as media:
        rows = [row_of(f"{web.url}/a", number=number) for number in range(8)]
        assert await asyncio.gather(*(code_of(media, row) for row in rows)) == [""] * 8
        assert len(web.requests) == 1
        clock.at += 61
        assert await code_of(media, rows[0]) == ""
        assert len(web.requests) == 2
        assert not media.urls._turns


async def test_rows_that_share_a_url_fail_together(web):
    """Their attempts do not follow each other; those of another run, and of a minute later, are made."""
    clock = HeldClock()
    web.files["/a"] = WebFile(status=503)
    async with loader(clock) as media:
        rows = [row_of(f"{web.url}/a", number=number) for number in range(30)]
        assert set(await asyncio.gather(*(code_of(media, row) for row in rows))) == {"media_unavailable"}
        assert len(web.requests) == 3
        rows[0].lease = SimpleNamespace(key="job/1", media=MediaBounds())
        assert await code_of(media, rows[0]) == "media_unavailable" and len(web.requests) == 6
        clock.at += 61
        web.files["/a"] = WebFile(PNG)
        assert await code_of(media, rows[1]) == "" and len(web.requests) == 7


async def test_hosts_that_are_allowed_later_are_reached(web):
    """A provision that comes while rows run counts for the next URL."""
    web.files["/a"] = WebFile(PNG)
    secrets.take(Provision())
    async with loader() as media:
        assert await code_of(media, row_of(f"{web.url}/a")) == "media_not_allowed"
        secrets.take(Provision(private_hosts=[web.host]))
        assert await code_of(media, row_of(f"{web.url}/a")) == ""


async def test_a_row_has_bounded_bytes(web):
    """Those of all its parts together."""
    web.files |= {f"/{n}": WebFile(PNG + b"x" * 30 * LIMIT) for n in range(2)}
    async with loader(bytes_max=200 * LIMIT) as media:
        loading = media.begin(row_of(*(f"{web.url}/{n}" for n in range(2))))
        with pytest.raises(InvalidRow, match="media_row_bytes_max") as refused:
            await loading.make(media_in)
        loading.close()
    assert refused.value.code == "media_too_large"


async def test_all_rows_together_hold_few_bytes(web):
    """However many are loaded: others wait, one that is larger than what is left goes alone, none waits for ever."""
    sizes = [1000, 70_000, 200_000, 3000, 90_000, 150_000, 10, 99_000]
    web.files = {f"/{n}": WebFile(PNG + b"x" * size) for n, size in enumerate(sizes)}
    held_most = out = 0

    async def run(media: RowMedia, number: int) -> None:
        nonlocal held_most, out
        loading = media.begin(row_of(f"{web.url}/{number % len(sizes)}", number=number))
        try:
            (part,) = await loading.make(media_in)
            held_most = max(held_most, sum(media._held.values()) + out)
        finally:
            loading.close()
        out += len(part.data)
        await asyncio.sleep(0)
        out -= len(part.data)
        media.wake()

    async with loader(bytes_max=100_000, calls=lambda: out) as media:
        await asyncio.gather(*(run(media, number) for number in range(40)))
        assert not media._held and not media._waiting and media._beyond is None
    assert 100_000 < held_most <= 100_000 + 4 * 200_100 // 3


async def test_a_row_waits_for_no_row_that_waits_for_it(web):
    """The older one wants a URL that the younger one fetches, which has no room beside the older one's bytes."""
    web.files["/a"] = WebFile(PNG)
    async with loader(bytes_max=100) as media:
        older, younger = media.begin(row_of(f"{web.url}/a")), media.begin(row_of(f"{web.url}/a", number=1))
        await older.hold(70)
        tasks = [asyncio.create_task(younger.make(media_in))]
        while not media._waiting:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(older.make(media_in)))
        assert len(await asyncio.gather(*tasks)) == 2
        older.close()
        younger.close()
    assert len(web.requests) == 1


async def test_rows_are_put_in_their_order(web):
    """As a provider's file needs them: some are loaded ahead, and one that fails does not stop the others."""
    web.files = {f"/{n}": WebFile(PNG, failures=[503] * (n == 1)) for n in range(40) if n != 7}
    rows = [row_of(f"{web.url}/{number}", number=number) for number in range(40)]
    put: list[tuple[int, str]] = []
    most = 0

    def add(row: Row, made) -> None:
        nonlocal most
        most = max(most, len(media._held))
        try:
            made()
            put.append((row.number, ""))
        except InvalidRow as error:
            put.append((row.number, error.code))

    async with loader(bytes_max=1) as media:
        await media.make_all(rows, media_in, add)
        assert not media._held
    assert put == [(number, "media_missing" if number == 7 else "") for number in range(40)]
    assert most == READS_MAX


async def test_a_url_leads_to_the_same_or_not(web):
    """Its server says so by what it said before, or its bytes do; in doubt it does not."""
    date = "Thu, 01 Jan 2026 00:00:00 GMT"
    digest = blake3(PNG).hexdigest()
    web.files = {
        "/a": WebFile(PNG, etag='"1"'), "/bare": WebFile(PNG, etag=""), "/down": WebFile(PNG, failures=[503]),
        "/large": WebFile(PNG, etag="", claimed_bytes=10**10), "/says": WebFile(status=304),
        "/moved": WebFile(status=302, headers={"Location": "/a"}),
    }  # fmt: skip
    cases = [
        ("/a", FetchedPart("other", '"1"'), True), ("/a", FetchedPart("other", '"2"'), False),
        ("/a", FetchedPart(digest, '"2"'), True), ("/moved", FetchedPart("other", '"1"'), True),
        ("/bare", FetchedPart(digest), True), ("/bare", FetchedPart("other"), False),
        ("/bare", FetchedPart(digest, "", date), True), ("/down", FetchedPart(digest, '"1"'), None),
        ("/gone", FetchedPart(digest), False), ("/large", FetchedPart(digest), False),
        ("/says", FetchedPart(digest), False), ("/says", FetchedPart("other", "", date), True),
    ]  # fmt: skip
    async with loader() as media:
        assert [await media.urls.is_same(web.url + path, before, LIMIT) for path, before, _ in cases] == [
            same for _, _, same in cases
        ]
        assert not await media.urls.is_same("http://169.254.169.254/", FetchedPart(digest), LIMIT)


async def test_a_row_knows_what_was_fetched_for_it(web):
    """A validator that could not be sent again is left out."""
    web.files["/a"] = WebFile(PNG, etag='"1"', headers={"Last-Modified": "x" * 300})
    async with loader() as media:
        row = row_of(f"{web.url}/a")
        assert await code_of(media, row) == ""
        assert row.fetched == (FetchedPart(blake3(PNG).hexdigest(), '"1"'),)


async def test_a_row_that_is_given_back_holds_nothing(web):
    """Its reply may still come."""
    web.files["/a"] = WebFile(PNG)
    async with loader() as media:
        loading = media.begin(row_of(f"{web.url}/a"))
        task = asyncio.create_task(loading.make(media_in))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loading.close()
        assert not media._held and not media.urls._turns


async def test_files_and_cells_are_read_beside_urls(web, tmp_path):
    """A file that has changed since it was sealed fails its row."""
    web.files["/a"] = WebFile(PNG)
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    known = {"type": "image/png", "size_bytes": len(PNG), "digest": blake3(PNG).hexdigest()}
    parts = [
        MediaPart("image", path=str(path), **known), MediaPart("image", url=f"{web.url}/a", column="img"),
        MediaPart("image", column="img", **known),
    ]  # fmt: skip
    cell = b64encode(PNG)
    row = Row(0, 0, with_media(b'{"img":"%b"}' % cell, parts), TableForm("?", media=[MediaColumn("image", "img")]))
    async with loader() as media:
        loading = media.begin(row)
        assert await loading.make(media_in) == (LoadedPart("image/png", cell.decode()),) * 3
        loading.close()
        path.write_bytes(PNG + b"!")
        assert await code_of(media, row) == "media_changed"


async def test_rows_that_wait_hold_up_no_others(web):
    """As many as may load at once wait for another attempt, or for one that does: a row of another URL is loaded."""

    class StandingClock(HeldClock):
        async def sleep(self, seconds: float) -> None:
            self.slept.append(seconds)
            await asyncio.Event().wait()

    web.files |= {"/good": WebFile(PNG)} | {f"/down{n}": WebFile(status=503) for n in range(READS_MAX)}
    urls = [f"{web.url}/down{n % READS_MAX}" for n in range(2 * READS_MAX)]
    async with loader(clock := StandingClock()) as media:
        waiting = [asyncio.create_task(code_of(media, row_of(url))) for url in urls]
        while len(clock.slept) < READS_MAX:
            await asyncio.sleep(0)
        assert await code_of(media, row_of(f"{web.url}/good")) == ""
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not media._held and not media.places._taken and not media.places._waiting
        assert await code_of(media, row_of(f"{web.url}/good")) == ""


async def test_a_place_for_the_row_that_must_go_on():
    """All others have places and wait for it: it gets one beyond them, also if it becomes the first while it waits."""
    first = None
    places = Places(2, lambda: first)
    await places.take(1)
    await places.take(2)
    third, fourth = (asyncio.create_task(places.take(number)) for number in (3, 4))
    await asyncio.sleep(0)
    assert not third.done() and not fourth.done()
    first = 4
    places.check()
    await fourth
    places.leave(1)
    await asyncio.sleep(0)
    assert not third.done(), "two have places"
    places.leave(2)
    await third
    fifth = asyncio.create_task(places.take(5))
    await asyncio.sleep(0)
    places.leave(4)
    fifth.cancel()  # it has its place, and does not know
    await asyncio.gather(fifth, return_exceptions=True)
    assert places._taken == {3}


async def test_a_server_that_is_gone_is_given_up(web, monkeypatch):
    """Then its rows fail without a call, rows of others do not; one asks again, and an answer ends it."""
    clock = HeldClock()
    web.files["/good"] = WebFile(PNG)
    with socket.socket() as gone:
        gone.bind((web.host, 0))
        host = f"{web.host}:{gone.getsockname()[1]}"
        async with loader(clock) as media:
            for number in range(FAILED_MAX - 1):
                assert await code_of(media, row_of(f"http://{host}/{number}.png")) == "media_unavailable"
            clock.at += SILENT_S
            attempts = len(clock.slept)
            assert media.note == ""
            assert await code_of(media, row_of(f"http://{host}/last.png")) == "media_unavailable"
            assert len(clock.slept) == attempts + 2 and f"media of {host} do not come" in media.note
            for number in range(20):
                loading = media.begin(row_of(f"http://{host}/more{number}.png"))
                with pytest.raises(InvalidRow, match="was given up for a while") as refused:
                    await loading.make(media_in)
                loading.close()
                assert refused.value.code == "media_unavailable"
                assert await code_of(media, row_of(f"{web.url}/good")) == ""
            assert len(clock.slept) == attempts + 2
            clock.at += PAUSE_S
            assert await code_of(media, row_of(f"http://{host}/again.png")) == "media_unavailable"
            assert len(clock.slept) == attempts + 3, "one attempt, and another pause"
            assert f"in {2 * PAUSE_S - clock.slept[-1]:.0f} s" in media.note
            clock.at += 2 * PAUSE_S
            media.urls._hosts.answered(f"http://{host}/again.png")
            assert media.note == ""


def test_few_servers_are_remembered():
    """The ones that failed last. A server that answers in between is never given up, nor one that failed just now."""
    hosts = MediaHosts()
    for number in range(HOSTS_MAX + 1):
        hosts.failed(f"https://h{number}.example/a", "no", 1.0, is_last=True)
    assert len(hosts._hosts) == HOSTS_MAX and "h0.example:443" not in hosts._hosts
    for number in range(3 * FAILED_MAX):
        hosts.failed("https://a.example/", "no", number * SILENT_S, is_last=True)
        if number % (FAILED_MAX - 1) == 0:
            hosts.answered("https://a.example/b")
        hosts.check("https://a.example/c", number * SILENT_S)
        hosts.failed("https://b.example/", "no", 1.0, is_last=True)
        hosts.check("https://b.example/c", 1.0)
    now = 1.0 + SILENT_S
    for _ in range(10):  # of rows that began before
        hosts.failed("https://b.example/", "no", now, is_last=True)
    for pause_s in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, PAUSE_MAX_S, PAUSE_MAX_S):
        with pytest.raises(InvalidRow):
            hosts.check("https://b.example/c", now + pause_s - 1)
        now += pause_s
        hosts.check("https://b.example/c", now)  # one row asks,
        with pytest.raises(InvalidRow):
            hosts.check("https://b.example/d", now)  # and the others do not
        hosts.failed("https://b.example/c", "no", now, is_last=False)

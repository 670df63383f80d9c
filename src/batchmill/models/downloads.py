"""Downloads URLs of callers to files: guarded, bounded, and resumed where the server can.

What is known of a download is beside its file: after a crash it goes on, if the server still has the same content by
its strong ETag. Otherwise it begins anew.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from urllib.parse import urljoin

import aiohttp
import msgspec
from msgspec import Struct
from yarl import URL

from batchmill.children.process_end import boot_id
from batchmill.errors import InvalidDataset, StorageFailed, StorageFull
from batchmill.models.addresses import Private, read_private, read_url
from batchmill.models.guarded_http import GuardedHttp, refusal_of
from batchmill.wire.input_urls import shown

REDIRECTS_MAX = 5
ATTEMPTS_MAX = 5  # that bring nothing new, one after the other
IDLE_S = 60.0  # for the head of a reply, and between two pieces of it
SESSION_S = 24 * 3600.0  # for one request; `time_s` bounds them together
HEAD_S_MAX = 30.0  # for the first bytes of a file
DELAY_S, DELAY_MAX_S = 0.5, 30.0  # before the second attempt, and the most before any
PIECE_BYTES = 1024 * 1024
TYPED_BYTES = 32  # of the answer of a server, in a message
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429)  # statuses below 500 of requests that may succeed later
_RANGE = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)")
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "batchmill"}
_CODECS = {"gzip": ".gz", "x-gzip": ".gz", "zstd": ".zst"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Pause = Callable[[float], Awaitable[None]]
CheckSize = Callable[[int], None]
Progress = Callable[[int, int | None], None]  # bytes so far, and of the whole file if the server says


class Downloaded(Struct):
    """What is known of a download. `etag` is empty if the server names none, or a weak one."""

    url: str
    etag: str = ""
    size_bytes: int | None = None
    is_complete: bool = False
    boot: str = ""  # of the machine when it was begun: what was not synced may be lost with its power


class _Broken(Exception):
    """The attempt failed, and another may succeed."""


def fetch(
    url: str, target: Path, private_hosts: Sequence[str], time_s: float, check_size: CheckSize,
    show: Callable[[float], None],
) -> Downloaded:  # fmt: skip
    """As `Downloads.fetch`, from a process without an event loop. `show` gets the share that is done."""

    def progress(size_bytes: int, whole: int | None) -> None:
        show(size_bytes / whole if whole else 0.0)

    async def run() -> Downloaded:
        with closing(Downloads(read_private(private_hosts))) as downloads:
            return await downloads.fetch(url, target, check_size, progress, time_s=time_s)

    return asyncio.run(run())


def read_head(url: str, private_hosts: Sequence[str], size_bytes: int) -> tuple[bytes, bool]:
    """As `Downloads.head`, from a thread without an event loop."""

    async def run() -> tuple[bytes, bool]:
        with closing(Downloads(read_private(private_hosts))) as downloads:
            return await downloads.head(url, size_bytes)

    return asyncio.run(run())


class Downloads:
    """Raises, everywhere: InvalidInput (`url_not_allowed`) for a URL or redirect that the guard refuses; InvalidDataset
    (`no_such_url`, `url_refused`) for what another attempt does not change; StorageFailed (`download_failed`).

    Args: private: hosts that may be reached although they are private.
    """

    def __init__(self, private: Private, *, pause: Pause = asyncio.sleep) -> None:
        self._private, self._pause = private, pause
        self._guard = GuardedHttp(private)

    def close(self) -> None:
        self._guard.close()

    async def head(self, url: str, size_bytes: int) -> tuple[bytes, bool]:
        """The first bytes of a file, and whether they are all of it."""
        data = b""
        try:
            async with asyncio.timeout(HEAD_S_MAX), self._opened(url, {}) as reply:
                self._check_status(url, reply)
                while len(data) <= size_bytes:
                    piece = await _next_piece(reply)
                    if not piece:
                        return data, True
                    data += piece
        except (_Broken, TimeoutError) as error:
            why = str(error) or f"it took more than {HEAD_S_MAX:.0f} s"
            raise StorageFailed(
                f"{shown(url)} cannot be read: {why}; try again later", code="download_failed"
            ) from None
        return data[:size_bytes], False

    async def fetch(
        self, url: str, target: Path, check_size: CheckSize, progress: Progress, *, time_s: float
    ) -> Downloaded:
        """Download a file, or the rest of it. It is durable when this returns.

        Args:
            check_size: raises an error for a file of so many bytes, which ends the download; called before each change
                of a file.
            time_s: for all attempts together.

        Raises: StorageFull.
        """
        record = target.with_name(f"{target.name}.download")
        known = _read_record(record, url, target)
        if known.is_complete:
            return known
        fetching = _Fetching(known, target, record, check_size, progress)
        failures, delay = 0, DELAY_S
        try:
            async with asyncio.timeout(time_s):
                while True:
                    before = fetching.resumable_bytes()
                    try:
                        await self._attempt(fetching)
                        return fetching.known
                    except _Broken as error:
                        is_further = fetching.resumable_bytes() > before
                        failures, delay = (0, DELAY_S) if is_further else (failures + 1, min(2 * delay, DELAY_MAX_S))
                        if failures == ATTEMPTS_MAX:
                            raise StorageFailed(
                                f"{shown(url)} cannot be downloaded: {error}, {failures} times; check the server, then "
                                "resume the job",
                                code="download_failed",
                            ) from None
                    await self._pause(delay * random.uniform(0.5, 1.0))
        except TimeoutError:
            raise StorageFailed(
                f"{shown(url)} was not downloaded in time ({time_s:,.0f} s were left for it); resume the job to go on "
                "with it",
                code="download_failed",
            ) from None
        finally:
            fetching.close()

    async def _attempt(self, fetching: _Fetching) -> None:
        """One request, and what came of it. Raises: _Broken."""
        start = fetching.resumable_bytes()
        headers = {"Range": f"bytes={start}-", "If-Range": fetching.known.etag} if start else {}
        async with self._opened(fetching.known.url, headers) as reply:
            if reply.status == 416 and start:
                fetching.known.etag = ""  # the next attempt begins anew
                raise _Broken("the server has less than it had")
            self._check_status(fetching.known.url, reply)
            if reply.status == 206 and not _is_wanted(reply, start, fetching.known.etag):
                fetching.known.etag = ""
                raise _Broken("the server sends another part of the file than it was asked for")
            fetching.begin(start if reply.status == 206 else 0, reply)
            while piece := await _next_piece(reply):
                fetching.write(piece)
            fetching.finish()

    @asynccontextmanager
    async def _opened(self, url: str, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of the reply, after redirects. Each URL and each address is checked. Raises: _Broken."""
        at = url
        for _ in range(REDIRECTS_MAX + 1):
            place = read_url(at, self._private)
            try:
                async with self._guard.session(place, SESSION_S) as session:
                    async with asyncio.timeout(IDLE_S):
                        reply = await session.get(
                            URL(at, encoded=True), headers=_HEADERS | headers, allow_redirects=False
                        )
                    async with reply:
                        if reply.status not in _REDIRECTS:
                            yield reply
                            return
                        at = _redirected(at, reply.headers.get("Location", ""))
            except (aiohttp.ClientError, OSError) as error:
                if reason := refusal_of(error):
                    raise InvalidDataset(f"{shown(url)} was not called: {reason}", code="url_not_allowed") from None
                raise _Broken(_words_of(error)) from None
        raise InvalidDataset(f"{shown(url)} is redirected more than {REDIRECTS_MAX} times", code="url_refused")

    def _check_status(self, url: str, reply: aiohttp.ClientResponse) -> None:
        """Raises: InvalidDataset, _Broken."""
        status = reply.status
        if status in (404, 410):
            raise InvalidDataset(f"there is no file {shown(url)}: the server answers {status}", code="no_such_url")
        if status >= 500 or status in _LATER:
            raise _Broken(f"the server answers {status}")
        if status not in (200, 206):
            way_out = "; use a URL that needs no login, or download the file" if status in (401, 403) else ""
            raise InvalidDataset(
                f"the server refuses {shown(url)} with the status {status}{way_out}", code="url_refused"
            )
        codec = reply.headers.get("Content-Encoding", "identity").lower()
        suffix = _CODECS.get(codec)
        if codec != "identity" and not (suffix and URL(url, encoded=True).path.endswith(suffix)):
            raise InvalidDataset(
                f"the server sends {shown(url)} packed ({codec[:TYPED_BYTES]}) although it was asked not to: download "
                "the file",
                code="url_refused",
            )


def _redirected(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise InvalidDataset(
            f"{shown(url)} is redirected to what is no URL: {location[:TYPED_BYTES]!r}", code="url_refused"
        ) from None


class _Fetching:
    """A file that is being written, and its record."""

    def __init__(
        self, known: Downloaded, target: Path, record: Path, check_size: CheckSize, progress: Progress
    ) -> None:
        self.known = known
        self._target, self._record = target, record
        self._check_size, self._progress = check_size, progress
        self._fd = -1
        self._bytes = 0

    def resumable_bytes(self) -> int:
        """How many bytes another attempt need not fetch again."""
        if not self.known.etag:
            return 0
        try:
            return self._target.stat().st_size
        except FileNotFoundError:
            return 0

    def begin(self, start: int, reply: aiohttp.ClientResponse) -> None:
        """Write from byte `start` on."""
        length = reply.content_length
        if length is None and not reply.headers.get("Transfer-Encoding"):
            raise InvalidDataset(
                f"the server does not say where {shown(self.known.url)} ends: one that is cut off would look whole; "
                "download the file",
                code="url_refused",
            )
        self.known.size_bytes = None if length is None else start + length
        self.known.etag = _strong_etag(reply)
        self._check_size(self.known.size_bytes or 0)
        self.close()
        with self._file_errors():
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._target, flags, 0o600)
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            self._write_record()  # only now: the bytes that are there belong to this ETag
        self._bytes = start

    def write(self, piece: bytes) -> None:
        self._check_size(self._bytes + len(piece))
        view = memoryview(piece)
        with self._file_errors():
            while view:
                view = view[os.write(self._fd, view) :]
        self._bytes += len(piece)
        self._progress(self._bytes, self.known.size_bytes)

    def finish(self) -> None:
        """Make the file durable. Raises: _Broken if bytes are missing."""
        size = self.known.size_bytes
        if size is not None and self._bytes != size:
            raise _Broken(f"the reply ended after {self._bytes:,} of {size:,} bytes")
        self._check_size(self._bytes)
        self.known.size_bytes, self.known.is_complete = self._bytes, True
        with self._file_errors():
            os.fsync(self._fd)
            self._write_record()
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Errors of the file are not those of the connection. Raises: StorageFull, StorageFailed."""
        try:
            yield
        except OSError as error:
            kind = StorageFull if error.errno in _FULL else StorageFailed
            raise kind(f"{shown(self.known.url)} cannot be written to {self._target}: {error.strerror}") from None

    def _write_record(self) -> None:
        temporary = self._record.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self.known))
        temporary.replace(self._record)


def _read_record(record: Path, url: str, target: Path) -> Downloaded:
    """What is known of an earlier attempt at this URL; a new record if nothing is."""
    try:
        known = msgspec.json.decode(record.read_bytes(), type=Downloaded)
        size = target.stat().st_size
    except (FileNotFoundError, msgspec.MsgspecError):
        return Downloaded(url, boot=_boot())
    if known.url != url or (known.size_bytes != size if known.is_complete else known.boot != _boot()):
        return Downloaded(url, boot=_boot())
    return known


def _boot() -> str:
    """The id of this boot of the machine: the pages of files that another container wrote are there, too."""
    return boot_id().partition("/")[0]


def _is_wanted(reply: aiohttp.ClientResponse, start: int, etag: str) -> bool:
    """Whether a part is the rest of the file that was asked for."""
    found = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
    return start > 0 and found is not None and int(found[1]) == start and _strong_etag(reply) == etag


def _strong_etag(reply: aiohttp.ClientResponse) -> str:
    etag = reply.headers.get("ETag", "")
    return etag if len(etag) > 2 and etag.startswith('"') else ""


async def _next_piece(reply: aiohttp.ClientResponse) -> bytes:
    """The next bytes of a body; empty at its end. Raises: aiohttp.ClientError, OSError."""
    async with asyncio.timeout(IDLE_S):
        return await reply.content.read(PIECE_BYTES)


def _words_of(error: BaseException) -> str:
    return f"the server sent nothing for {IDLE_S:.0f} s" if isinstance(error, TimeoutError) else failure_of(error)


def failure_of(error: BaseException) -> str:
    """What went wrong between here and a server, in words that hold nothing of its address."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "its name could not be resolved"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return "no trusted TLS connection could be made"
        case aiohttp.ClientConnectorError():
            return "the server could not be reached"
        case _:
            return "the reply was cut off, or was not valid HTTP"

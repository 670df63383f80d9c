"""Files in S3: brought there in pieces, read in pieces, listed and deleted.

Over the engine's own connections, so that one guard, one set of keys and one judgement of failures hold for all that
leaves: no second HTTP client with its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from msgspec import Struct

from batchmill.engines.connections import Connections, FilePart
from batchmill.engines.provider_batch.aws import Account, Signed, is_host
from batchmill.engines.provider_batch.calls import Out, Refusal
from batchmill.engines.provider_batch.provider import JobRefused, TryAgain
from batchmill.errors import ModelFailed

PUT_BYTES_MAX = 5 * 1024**3  # that S3 takes in one piece
PAGES_MAX = 100  # of a listing, a thousand names each

_URI = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_*'().=/-]*))?")
_NAMESPACE = re.compile(r"\{[^}]*\}")


class Place(Struct, frozen=True):
    """A bucket and a name in it."""

    bucket: str
    key: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def below(self, name: str) -> Place:
        return Place(self.bucket, f"{self.key}/{name}".lstrip("/"))


def read_uri(uri: str) -> Place:
    """Raises: ModelFailed for what is no s3://BUCKET/PREFIX of plain characters."""
    found = _URI.fullmatch(uri)
    if found is None:
        raise ModelFailed(f"{uri[:200]!r} is no place in S3: write s3://BUCKET/PREFIX", code="invalid_argument")
    return Place(found[1], (found[2] or "").strip("/"))


class S3:
    """The files of one account. Every method raises what `Calls.call` raises."""

    def __init__(self, account: Account, connections: Connections) -> None:
        """The engine argument `s3_endpoint` is another server that speaks S3. Raises: ModelFailed."""
        self._region, self._domain = account.region, account.domain
        self._endpoint = (account.argument("s3_endpoint") or "").rstrip("/")
        if self._endpoint and not is_host(self._endpoint):
            raise ModelFailed(f"s3_endpoint {self._endpoint!r} is no address", code="invalid_argument")
        self._calls = Signed(account, "s3", connections).calls

    async def put(self, place: Place, file: Path, size: int) -> None:
        """Bring a file there; what is there already is replaced. Raises: JobRefused where it is not taken."""
        if size > PUT_BYTES_MAX:
            raise JobRefused(f"S3 takes no {size:,} bytes in one piece: set bytes_max to {PUT_BYTES_MAX} at most")
        digest = await asyncio.to_thread(_digest, file)
        told = {"Content-Type": "application/jsonl"}
        out = Out("PUT", self._url(place), headers=told, parts=[FilePart(file, size)], sha256=digest)
        try:
            await self._calls.send(out)
        except Refusal as refusal:
            raise JobRefused(f"{place.uri} cannot be written: {refusal.message}") from None

    async def has(self, place: Place) -> bool:
        """Whether a file is there. Asked by a listing: the answer to a HEAD would not say why it was refused."""
        return place.key in [each.key async for each in self.list(place)]

    async def list(self, place: Place) -> AsyncIterator[Place]:
        """The files whose names begin as `place` does."""
        query = {"list-type": "2", "prefix": place.key}
        for _ in range(PAGES_MAX):
            answer = await self._calls.call("GET", self._url(Place(place.bucket, ""), query))
            keys, token = _listing(answer.data)
            for key in keys:
                yield Place(place.bucket, key)
            if not token:
                return
            query["continuation-token"] = token
        raise JobRefused(f"there are more than {PAGES_MAX},000 files below {place.uri}")

    def lines(self, place: Place) -> AsyncIterator[list[bytes]]:
        """The lines of a file, some hundreds at a time; empty ones are left out."""
        return self._calls.lines(self._url(place))

    async def delete(self, place: Place) -> None:
        """Delete a file; one that is not there is no error."""
        try:
            await self._calls.call("DELETE", self._url(place))
        except Refusal as refusal:
            if refusal.status != 404:
                raise

    async def delete_below(self, place: Place) -> None:
        """Delete every file of a folder."""
        for each in [each async for each in self.list(Place(place.bucket, f"{place.key}/"))]:
            await self.delete(each)

    def _url(self, place: Place, query: dict[str, str] | None = None) -> str:
        path = quote(place.key, safe="/~-._")
        if self._endpoint:
            base = f"{self._endpoint}/{place.bucket}"
        elif "." in place.bucket:  # the certificate of the bucket's own host does not hold for such a name
            base = f"https://s3.{self._region}.{self._domain}/{place.bucket}"
        else:
            base = f"https://{place.bucket}.s3.{self._region}.{self._domain}"
        return f"{base}/{path}" + (f"?{urlencode(query, quote_via=quote)}" if query else "")


def _digest(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _listing(data: bytes) -> tuple[list[str], str]:
    """The names in a reply to ListObjectsV2, and what asks for the next of them."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        raise TryAgain(f"the listing of a bucket is no XML: it begins {data[:100]!r}") from None
    keys, token = [], ""
    for each in root.iter():
        match _NAMESPACE.sub("", each.tag):
            case "Key":
                keys.append(each.text or "")
            case "NextContinuationToken":
                token = each.text or ""
    return keys, token

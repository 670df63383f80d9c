"""Whether URLs of rows lead to what they led to when earlier results were made: their servers are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from batchmill.engines.clock import SystemClock
from batchmill.engines.media_urls import MediaUrls
from batchmill.models.addresses import read_private
from batchmill.types import DatasetSpec, FetchedPart
from batchmill.wire.forms import FETCHED
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rendered_rows import media_of

AT_ONCE = 16  # servers that are asked together
KNOWN_MAX = 10_000  # answers that are remembered, for rows that share a URL

_text = msgspec.json.Decoder(str)
_parts = msgspec.json.Decoder(list[FetchedPart])
Question = tuple[str, FetchedPart]


class EarlierMedia:
    """Asks for the rows of one job."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec, self._private = spec, read_private(spec.private_hosts)
        self._known: dict[Question, bool] = {}

    def are_same(self, lines: Sequence[bytes], raws: Sequence[bytes]) -> list[bool]:
        """Of each result whether it is of what its row names now. Rows without URLs are: their digests are equal."""
        questions = [_questions(line, raw) for line, raw in zip(lines, raws, strict=True)]
        new = {each for some in questions for each in some or () if each not in self._known}
        if len(self._known) + len(new) > KNOWN_MAX:
            self._known.clear()
            new = {each for some in questions for each in some or ()}
        if new:
            self._known |= asyncio.run(self._ask(list(new)))
        return [some is not None and all(self._known[each] for each in some) for some in questions]

    async def _ask(self, questions: list[Question]) -> dict[Question, bool]:
        urls = MediaUrls(1, lambda: None, clock=SystemClock(), jitter=lambda: 0.0, allowed=lambda: self._private)
        places = asyncio.Semaphore(AT_ONCE)

        async def one(question: Question) -> bool:
            async with places:
                return await urls.is_same(*question, self._spec.media_bytes_max)

        try:
            answers = await asyncio.gather(*map(one, questions))
        finally:
            await urls.close()
        return dict(zip(questions, answers, strict=True))


def _questions(line: bytes, raw: bytes) -> list[Question] | None:
    """What to ask for a row whose earlier result is a line; None: it does not say what it was made of."""
    urls = [part.url for part in media_of(split_object(raw)) if part.url]
    if not urls:
        return []
    said = split_object(line).get(FETCHED, Raw(b"null"))
    try:
        found = _parts.decode(_text.decode(said))
    except msgspec.MsgspecError:
        return None
    return list(zip(urls, found, strict=True)) if len(found) == len(urls) else None

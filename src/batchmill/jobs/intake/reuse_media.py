"""Whether URLs of rows lead to what they led to when earlier results were made: their servers are asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from batchmill.engines.clock import SystemClock
from batchmill.engines.media_urls import MediaUrls
from batchmill.models.addresses import read_private
from batchmill.types import DatasetSpec, FetchedPart
from batchmill.wire.input_urls import shown
from batchmill.wire.json_bytes import split_object
from batchmill.wire.rows.forms import FETCHED
from batchmill.wire.rows.rendered_rows import media_of

AT_ONCE = 16  # servers that are asked together
KNOWN_MAX = 10_000  # answers that are remembered, for rows that share a URL
SILENT_MAX = 16  # times in a row that a server does not answer; then it is asked no more
SERVERS_MAX = 10_000  # of which it is remembered
ASKING_S = 3600.0  # for all questions of one lookup together

_text = msgspec.json.Decoder(str)
_parts = msgspec.json.Decoder(list[FetchedPart])
Question = tuple[str, FetchedPart]


class EarlierMedia:
    """Asks for the rows of one job."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec, self._private = spec, read_private(spec.private_hosts)
        self._known: dict[Question, bool] = {}
        self._silent: Counter[str] = Counter()  # server -> how often it has not answered, in a row
        self._left_s = ASKING_S

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

    def unasked(self) -> list[str]:
        """What was not asked to the end, in words."""
        found = [
            f"rows with URLs of {server}, which has not answered {SILENT_MAX} times in a row"
            for server, times in self._silent.items()
            if times >= SILENT_MAX
        ]
        late = [] if self._left_s > 0 else [f"rows whose URLs were not asked about within {ASKING_S:,.0f} s"]
        return [*found, *late]

    async def _ask(self, questions: list[Question]) -> dict[Question, bool]:
        """The answers; False where none has come."""
        answers = dict.fromkeys(questions, False)
        clock, places = SystemClock(), asyncio.Semaphore(AT_ONCE)
        urls = MediaUrls(1, lambda: None, clock=clock, jitter=lambda: 0.0, allowed=lambda: self._private)
        if len(self._silent) > SERVERS_MAX:
            self._silent.clear()

        async def one(question: Question) -> None:
            server = _server_of(question[0])
            async with places:
                if self._silent[server] >= SILENT_MAX:
                    return
                is_same = await urls.is_same(*question, self._spec.media_bytes_max)
            if is_same is None:
                self._silent[server] += 1
            else:
                self._silent.pop(server, None)
                answers[question] = is_same

        since = clock.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._left_s)):
                await asyncio.gather(*map(one, questions))
        except TimeoutError:
            self._left_s = 0.0
        finally:
            await urls.close()
        self._left_s -= clock.monotonic() - since
        return answers


def _server_of(url: str) -> str:
    return shown("/".join(url.split("/", 3)[:3]))


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

"""Servers of media that do not answer any more: a circuit breaker for each.

A server is given up after several URLs have failed, each after all its attempts, and for a while without any answer.
Then its rows fail at once; those of other servers do not. After a pause one row asks again, and its answer ends it.
"""

from __future__ import annotations

from collections import OrderedDict
from urllib.parse import urlsplit

from msgspec import Struct

from batchmill.errors import InvalidRow
from batchmill.wire.input_urls import shown

HOSTS_MAX = 1024  # that have failed lately; a further one takes the place of the one that failed the longest ago
FAILED_MAX = 8  # URLs that fail one after the other,
SILENT_S = 30.0  # and how long without an answer, before a server is given up
PAUSE_S, PAUSE_MAX_S = 30.0, 300.0  # before one row asks again: the first time, and at most
SHOWN_MAX = 3  # servers in a note


class _Host(Struct):
    since: float  # of the first failure after the last answer
    failed: int = 0  # URLs
    pause_s: float = 0.0  # 0: it is not given up
    until: float = 0.0  # until when rows fail at once
    is_asked: bool = False  # by one row, after the pause
    why: str = ""


class MediaHosts:
    """Times are monotonic seconds. Concurrency: on the event loop's thread only."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    def check(self, url: str, now: float) -> None:
        """Raises: InvalidRow (`media_unavailable`) if the server of a URL is given up, and no row is to ask again."""
        host = self._hosts.get(host_of(url))
        if host is None or not host.pause_s:
            return
        if now < host.until:
            raise InvalidRow(
                f"{shown(url)} was not fetched: {host_of(url)} does not answer ({host.why}) and was given up for a "
                "while; `batchmill retry` tries it again",
                code="media_unavailable",
            )
        host.is_asked, host.until = True, now + host.pause_s  # for other rows, while this one asks

    def answered(self, url: str) -> None:
        """A server has answered, whatever it was."""
        self._hosts.pop(host_of(url), None)

    def failed(self, url: str, why: str, now: float, *, is_last: bool) -> None:
        """An attempt failed. Args: is_last: the row makes no other one."""
        name = host_of(url)
        host = self._hosts.setdefault(name, _Host(now))
        self._hosts.move_to_end(name)
        if len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)
        host.why = why
        host.failed += is_last
        if host.is_asked:
            host.pause_s, host.is_asked = min(2 * host.pause_s, PAUSE_MAX_S), False
        elif not host.pause_s and is_last and host.failed >= FAILED_MAX and now - host.since >= SILENT_S:
            host.pause_s = PAUSE_S
        else:
            return  # a row that had begun before it was given up says nothing new
        host.until = now + host.pause_s

    def note(self, now: float) -> str:
        """Which servers are given up, for views; empty: none is."""
        given_up = [name for name, host in self._hosts.items() if host.pause_s]
        if not given_up:
            return ""
        more = f" and {len(given_up) - SHOWN_MAX:,} more" if len(given_up) > SHOWN_MAX else ""
        wait_s = max(0.0, min(self._hosts[name].until for name in given_up) - now)
        return (
            f"media of {', '.join(given_up[-SHOWN_MAX:])}{more} do not come: their rows fail at once; one asks again "
            f"in {wait_s:.0f} s"
        )


def host_of(url: str) -> str:
    """The host and port of a URL that the guard has read."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme.lower() == 'https' else 80)}"

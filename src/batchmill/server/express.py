"""The express lane: hot operations that are begun without a task and answered by one write.

A request that is in any way unusual goes the normal way, through `HttpRoot`; what a client sees is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from batchmill.errors import BatchmillError
from batchmill.types import Caller

Headers = Sequence[tuple[bytes, bytes]]
Cancel = Callable[[], None]  # nobody waits for the answer any more


class Reply(Protocol):
    """The one reply to a request; `__call__` or `refuse` ends it, whichever comes first."""

    def __call__(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer. `headers` without Content-Length and those that every reply has; names in lower case."""

    def refuse(self, error: BatchmillError) -> None:
        """Answer as the operation's dialect says it: its `refusal`, as if the handler had raised."""


class Express(Protocol):
    """The short way of an operation, beside its handler: see `Operation.express`."""

    def begin(self, path: dict[str, str], headers: Headers, body: bytes, caller: Caller, reply: Reply) -> Cancel | None:
        """Begin to answer, or return None without having done anything: the handler then gets the request.

        Never waits and never raises. The host, the key and its rate have been looked at; `path` is decoded, `body` is
        whole, and there is no query. `reply` may be called before this returns.
        """

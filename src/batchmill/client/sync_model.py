"""A deployed function at a server: its versions, its aliases, and what is printed while one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchmill.client import calls
from batchmill.client.streams import Bytes
from batchmill.client.writing import asked_of
from batchmill.wire.native import (
    AliasInfo,
    BackendInfo,
    FunctionDetail,
    Merge,
    Restart,
    Rollback,
    VersionInfo,
)
from batchmill.wire.native_logs import LIMIT_DEFAULT, LogPage, LogQuery

if TYPE_CHECKING:
    from batchmill.client.sync import Client


class Model:
    """Raises, everywhere: UnknownName (`model_not_found`) for a function or version that is not there."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name

    def show(self) -> FunctionDetail:
        """Its versions, what its names stand for, and how it is called."""
        return self._client.call(calls.model(self.name))

    def openapi(self) -> dict[str, Any]:
        """Its OpenAPI document."""
        return self._client.call(calls.model_document(self.name))

    def log(self, *, branch: str | None = None, version: int | str | None = None) -> str:
        """What was printed while a version was made: the newest that was tried, where none is named."""
        wanted = None if version is None else str(version)
        pieces = self._client.read(Bytes(calls.model_log(self.name, branch=branch, version=wanted)))
        return b"".join(pieces).decode(errors="replace")

    def logs(
        self, *, request: str | None = None, branch: str | None = None, version: int | str | None = None,
        after: str | None = None, limit: int = LIMIT_DEFAULT,
    ) -> LogPage:  # fmt: skip
        """What its calls printed and raised: the last lines, or those behind `after`, which is `next` of a page.

        Args:
            request: the id of a request (x-request-id of its reply) or of a job: nothing else is told then.
        """
        query = LogQuery(branch, None if version is None else str(version), request, after, limit)
        return self._client.call(calls.model_calls(self.name, query))

    def rollback(self, number: int | None = None, *, branch: str = "main") -> VersionInfo:
        """Let an earlier version be the latest: this one, or the one before."""
        return self._client.call(calls.rollback(self.name, Rollback(branch, number)))

    def merge(self, source: str, *, into: str = "main") -> VersionInfo:
        """Make the latest of one branch a new version of another."""
        return self._client.call(calls.merge(self.name, Merge(source, into)))

    def restart(self, *, branch: str = "main") -> VersionInfo:
        """Make the latest again, under a new number, with workers of its own."""
        return self._client.call(calls.restart(self.name, Restart(branch)))

    def set_alias(
        self, alias: str, backends: dict[int, float] | list[BackendInfo], mirrors: Sequence[int | BackendInfo] = ()
    ) -> AliasInfo:
        """Let an alias stand for versions.

        Args:
            backends: number -> weight on the branch main, or BackendInfo for other branches too.
            mirrors: versions that get copies of the calls; their answers go nowhere.
        """
        return self._client.call(calls.set_alias(self.name, alias, asked_of(backends, mirrors)))

    def remove_alias(self, alias: str) -> None:
        self._client.call(calls.remove_alias(self.name, alias))

    def remove(self, *, branch: str | None = None, version: int | None = None) -> list[VersionInfo]:
        """Remove a version, a branch, or all. Raises: Conflict (`version_in_use`)."""
        wanted = None if version is None else str(version)
        return (self._client.call(calls.remove_model(self.name, branch=branch, version=wanted))).versions

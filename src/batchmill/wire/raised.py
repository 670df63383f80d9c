"""Errors on their way from one process to another."""

from __future__ import annotations

from msgspec import Struct

from batchmill import errors
from batchmill.errors import BatchmillError, JobPaused, RateLimited
from batchmill.states import PauseReason


class Raised(Struct, frozen=True, tag="raised"):
    """A BatchmillError as it travels."""

    kind: str
    code: str
    message: str
    reason: str | None = None
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: BatchmillError) -> Raised:
        reason = str(error.reason) if isinstance(error, JobPaused) else None
        wait_s = error.retry_after_s if isinstance(error, RateLimited) else 0.0
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return cls(kind.__name__, error.code, error.message, reason, wait_s)

    def error(self) -> BatchmillError:
        """The error itself, of the kind it was."""
        kind = getattr(errors, self.kind, BatchmillError)
        if issubclass(kind, JobPaused):
            return kind(self.message, reason=PauseReason(self.reason) if self.reason else None)
        if issubclass(kind, RateLimited):
            return kind(self.message, retry_after_s=self.retry_after_s, code=self.code)
        return kind(self.message, code=self.code)

"""All errors that batchmill raises on purpose.

BatchmillError
├── InvalidInput            the caller's file, flag or config is wrong
│   ├── InvalidConfig
│   ├── InvalidRow          one row is wrong; `code` says how
│   ├── InvalidDataset      the file as a whole cannot be read
│   ├── UnknownName         an unknown job, file, model, adapter or engine
│   │   └── Gone            it was deleted: the message says by whom and when
│   ├── InvalidTransition   the request does not fit the job's state
│   ├── Conflict            it conflicts with something that exists: a repeated key, a file in use
│   ├── TooLarge            more bytes, rows or parts than the limit
│   └── TooComplex          it took more time or memory than the limit
├── Refused                 the caller may not do this
│   ├── Unauthenticated     no key, or an invalid one
│   ├── Forbidden           the key lacks the right
│   │   └── OverQuota       its project has used up a quota
│   └── RateLimited         too many requests; `retry_after_s` says when to retry
├── JobPaused               the job stopped and can be resumed; `reason` is a states.PauseReason
│   ├── InputChanged        a file differs from what was sealed
│   │   └── DatasetDamaged  the sealed copy is damaged; the input file may be unchanged
│   ├── AuthRefused         the service refused the credentials
│   ├── QuotaExhausted      the account has no budget left
│   ├── SubmitUnknown       it is unknown whether a provider accepted a batch of rows
│   ├── RouteFailed         this route to a model failed; another of its routes may work
│   ├── StorageFull
│   ├── DatabaseUnavailable PostgreSQL cannot be reached, or not be written for now
│   │   └── TermOver        this process may not act as the owner of the database for now
│   └── StorageFailed       the disk or object store failed, or too many files were open
├── ModelFailed             user code or an engine could not be started
├── Unavailable             not now: the server is stopping, a model is still loading
│   ├── DatabaseOwned       another process owns the database
│   └── OwnerReplaced       another process has become the owner of the database
└── LedgerBroken            an invariant of the ledger does not hold: work stops

`code` is stable, `blame` says whose fault it is (caller, model, system), and `retryable` whether the same call may
succeed later. Messages say what happened, the offending value, and the way out. HTTP statuses are in
`wire/error_statuses.py`.
"""

from __future__ import annotations

import errno
import os

from batchmill.states import PauseReason


class BatchmillError(Exception):
    code = "internal_error"
    blame = "system"
    retryable = False
    request_id: str | None = None  # the id of the request that it answers, if there is one
    # Of a request without a route: its method, its path, and the path's allowed methods.
    unmatched_request: tuple[str, str, tuple[str, ...]] | None = None

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        return str(self.args[0])


class InvalidInput(BatchmillError):
    code = "invalid_input"
    blame = "caller"


class InvalidConfig(InvalidInput):
    code = "invalid_config"


class InvalidRow(InvalidInput):
    code = "invalid_row"


class InvalidDataset(InvalidInput):
    code = "invalid_dataset"


class UnknownName(InvalidInput):
    code = "unknown_name"


class Gone(UnknownName):
    code = "deleted"
    project: str | None = None  # the owner: other projects do not learn of the deletion


class InvalidTransition(InvalidInput):
    code = "invalid_transition"


class Conflict(InvalidInput):
    code = "conflict"


class TooLarge(InvalidInput):
    code = "too_large"


class TooComplex(InvalidInput):
    code = "too_complex"


class Refused(BatchmillError):
    code = "refused"
    blame = "caller"


class Unauthenticated(Refused):
    code = "invalid_api_key"


class Forbidden(Refused):
    code = "forbidden"


class OverQuota(Forbidden):
    code = "quota_exceeded"


class RateLimited(Refused):
    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class JobPaused(BatchmillError):
    code = "paused"
    retryable = True
    reason = PauseReason.REQUESTED

    def __init__(self, message: str, *, code: str | None = None, reason: PauseReason | None = None) -> None:
        super().__init__(message, code=code)
        if reason is not None:
            self.reason = reason


class InputChanged(JobPaused):
    code = "input_changed"
    blame = "caller"
    reason = PauseReason.INPUT_CHANGED


class DatasetDamaged(InputChanged):
    code = "dataset_damaged"
    blame = "system"
    reason = PauseReason.DATASET_DAMAGED


class AuthRefused(JobPaused):
    code = "auth_refused"
    blame = "caller"
    reason = PauseReason.AUTH


class QuotaExhausted(JobPaused):
    code = "quota_exhausted"
    blame = "caller"
    reason = PauseReason.QUOTA


class SubmitUnknown(JobPaused):
    code = "submit_unknown"
    retryable = False
    reason = PauseReason.SUBMIT_UNKNOWN


class RouteFailed(JobPaused):
    code = "route_failed"
    reason = PauseReason.ROUTE_FAILED


class StorageFull(JobPaused):
    code = "storage_full"
    reason = PauseReason.STORAGE_FULL


class StorageFailed(JobPaused):
    code = "storage_failed"
    reason = PauseReason.STORAGE_FAILED


class DatabaseUnavailable(JobPaused):
    code = "database_unavailable"
    reason = PauseReason.DATABASE_UNAVAILABLE


class TermOver(DatabaseUnavailable):
    """Of what one call was about to do: the transaction that it shares with others can go on."""


def to_storage_error(error: OSError, *, refusals: bool = False) -> JobPaused | None:
    """Turn an error of the file system into one for people; None: it says nothing about the machine's state.

    Args: refusals: also for missing permissions.
    """
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    detail = f"{where}{error.strerror}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StorageFull(f"the disk is full: {detail}; free some space, then try again")
        case errno.EMFILE | errno.ENFILE:
            return StorageFailed(f"too many files are open: {detail}; raise the limit (`ulimit -n`), then try again")
        case errno.EIO | errno.ESTALE:
            return StorageFailed(f"the disk failed: {detail}; repair it, then try again")
        case errno.EACCES | errno.EPERM | errno.EROFS if refusals:
            return StorageFailed(f"access to a file was denied: {detail}; check its owner and mode, then try again")
    return None


class ModelFailed(BatchmillError):
    code = "model_failed"
    blame = "model"


class Unavailable(BatchmillError):
    code = "unavailable"
    retryable = True


class DatabaseOwned(Unavailable):
    code = "database_owned"

    address = ""  # the owner's URL; empty: it serves nothing
    data_dir = ""  # of the owner
    heartbeat: object = None  # changes while the owner lives


class OwnerReplaced(Unavailable):
    code = "owner_replaced"


class LedgerBroken(BatchmillError):
    code = "ledger_broken"

"""Every error batchmill raises on purpose.

BatchmillError
├── InvalidInput            the caller's file, flag or config is wrong
│   ├── InvalidConfig
│   ├── InvalidRow          one row is wrong; `code` says how
│   ├── InvalidDataset      the file as a whole cannot be read
│   ├── UnknownName         a job, file, model, adapter or engine nobody knows
│   │   └── Gone            it was there and was deleted: the message says by whom and when
│   ├── InvalidTransition   what was asked does not fit the job's state
│   ├── Conflict            it contradicts something that is there: a repeated key, a file in use
│   ├── TooLarge            more bytes, rows or parts than are taken
│   └── TooComplex          it took more time or memory than it may
├── Refused                 the caller may not do this
│   ├── Unauthenticated     no key, or none that is valid
│   ├── Forbidden           the key does not reach so far
│   │   └── OverQuota       its project has as many of these, or bytes, as it may
│   └── RateLimited         too many requests; `retry_after_s` says when to come again
├── JobPaused               the job stopped and can go on; `reason` is a states.PauseReason
│   ├── InputChanged        a file is not what was sealed
│   │   └── DatasetDamaged  what was kept of it is not what was written; the file may be as it was
│   ├── AuthRefused         the service refused the credentials
│   ├── QuotaExhausted      the account has nothing left to spend
│   ├── SubmitUnknown       nobody can say whether a provider took a batch of rows
│   ├── RouteFailed         this way to a model does not go on; another of its routes may
│   ├── StorageFull
│   └── StorageFailed       the disk, or the bound of open files, is in the way
├── ModelFailed             user code or an engine could not be started
├── Unavailable             not now: the server is stopping, a model is still being loaded
└── LedgerBroken            an invariant does not hold: stop rather than go on wrong

`code` is stable, `blame` says whose fault it is (caller, model, system), and `retryable` whether the same call may
succeed later. Messages say what happened, the offending value, and the way out. No HTTP status here: that
is `wire/error_statuses.py`'s.
"""

from __future__ import annotations

import errno
import os

from batchmill.states import PauseReason


class BatchmillError(Exception):
    code = "internal_error"
    blame = "system"
    retryable = False
    request_id: str | None = None  # of the request that it answers, where there is one
    asked: tuple[str, str, tuple[str, ...]] | None = None  # a method and a path that mean nothing; methods that do

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
    project: str | None = None  # whose it was: others are not told


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
    reason = PauseReason.ASKED

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


def of_system(error: OSError, *, refusals: bool = False) -> JobPaused | None:
    """What an error of the file system is for people; None for one that says nothing of the machine's state.

    Args: refusals: also where the file system is sound and this user may not.
    """
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    detail = f"{where}{error.strerror}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StorageFull(f"there is no room left on the disk: {detail}; free some, then do it again")
        case errno.EMFILE | errno.ENFILE:
            return StorageFailed(
                f"no further file can be opened: {detail}; raise the limit (`ulimit -n`), then do it again"
            )
        case errno.EIO | errno.ESTALE:
            return StorageFailed(f"the disk failed: {detail}; see to it, then do it again")
        case errno.EACCES | errno.EPERM | errno.EROFS if refusals:
            return StorageFailed(f"a file may not be used: {detail}; see to its owner and mode, then do it again")
    return None


class ModelFailed(BatchmillError):
    code = "model_failed"
    blame = "model"


class Unavailable(BatchmillError):
    code = "unavailable"
    retryable = True


class LedgerBroken(BatchmillError):
    code = "ledger_broken"

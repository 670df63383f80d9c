"""Every error batchmill raises on purpose.

BatchmillError
├── InvalidInput            the caller's file, flag or config is wrong
│   ├── InvalidConfig
│   ├── InvalidRow          one row is wrong; `code` says how
│   ├── InvalidDataset      the file as a whole cannot be read
│   ├── UnknownName         a job, model, adapter or engine nobody knows
│   └── InvalidTransition   what was asked does not fit the job's state
├── JobPaused               the job stopped and can go on; `reason` is a states.PauseReason
│   ├── InputChanged        a file is not what was sealed
│   ├── AuthRefused         the service refused the credentials
│   ├── QuotaExhausted      the account has nothing left to spend
│   └── StorageFull
├── ModelFailed             user code or an engine could not be started
└── LedgerBroken            an invariant does not hold: stop rather than go on wrong

`code` is stable, `blame` says whose fault it is (caller, model, system), and `retryable` whether the same call may
succeed later. Messages say what happened, the offending value, and the way out. No HTTP status here: each dialect has
its own table.
"""

from __future__ import annotations

from batchmill.states import PauseReason


class BatchmillError(Exception):
    code = "internal_error"
    blame = "system"
    retryable = False

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


class InvalidTransition(InvalidInput):
    code = "invalid_transition"


class JobPaused(BatchmillError):
    code = "paused"
    retryable = True
    reason = PauseReason.ASKED

    def __init__(self, message: str, *, reason: PauseReason | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class InputChanged(JobPaused):
    code = "input_changed"
    blame = "caller"
    reason = PauseReason.INPUT_CHANGED


class AuthRefused(JobPaused):
    code = "auth_refused"
    blame = "caller"
    reason = PauseReason.AUTH


class QuotaExhausted(JobPaused):
    code = "quota_exhausted"
    blame = "caller"
    reason = PauseReason.QUOTA


class StorageFull(JobPaused):
    code = "storage_full"
    reason = PauseReason.STORAGE_FULL


class ModelFailed(BatchmillError):
    code = "model_failed"
    blame = "model"


class LedgerBroken(BatchmillError):
    code = "ledger_broken"

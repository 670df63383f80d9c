"""Configuration: file, environment and flags as one frozen Config."""

from batchmill.config.checks import LIMITS_MAX, MODEL_NAME, PROJECT_NAME, SERVER_MAX, WORKERS_MAX, limit_flaw, load
from batchmill.config.entries import (
    KEY_FILE,
    BackupsEntry,
    Config,
    DatabaseEntry,
    DeploymentsEntry,
    InputLimits,
    MlCommonsEntry,
    ModelEntry,
    ProjectEntry,
    QuarantineEntry,
    RetentionEntry,
    ServerEntry,
    StatusRegex,
    StorageEntry,
    WebhookEntry,
)

__all__ = [
    "KEY_FILE", "LIMITS_MAX", "MODEL_NAME", "PROJECT_NAME", "SERVER_MAX", "WORKERS_MAX", "BackupsEntry", "Config",
    "DatabaseEntry", "DeploymentsEntry", "InputLimits", "MlCommonsEntry", "ModelEntry", "ProjectEntry",
    "QuarantineEntry", "RetentionEntry", "ServerEntry", "StatusRegex", "StorageEntry", "WebhookEntry", "limit_flaw",
    "load",
]  # fmt: skip

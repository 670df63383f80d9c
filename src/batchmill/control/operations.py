"""What the machine's user alone may ask of an owner: orders that name local paths and code, and what no key reaches.

These operations exist only in the application of the control socket. A remote caller cannot reach them: the application
of the server has no such route.
"""

from __future__ import annotations

from msgspec import Struct

from batchmill.types import JobOrder, LedgerReport, Scope, Submitted
from batchmill.wire.operations import NOTHING, Endpoint

PREFIX = "/control/v1"
PROJECT = "batchmill-project"  # the header that says for which project the machine's user asks

_JOBS = f"{PREFIX}/jobs"
_USER = Scope.DEPLOY  # nobody is asked for a key here: the socket's file belongs to the machine's user


class LocalFile(Struct, frozen=True):
    """A file on this machine."""

    path: str


PING = Endpoint("ping", "GET", f"{PREFIX}/ping", "Whether the owner answers", _USER, NOTHING, status=204)
RUN = Endpoint(
    "run", "POST", _JOBS, "Start, resume or join a job of local files", _USER, Submitted, body=JobOrder,
)  # fmt: skip
PARTIAL = Endpoint(
    "partial", "POST", f"{_JOBS}/{{job_id}}/partial", "Write the rows that are finished to a new file", _USER, LocalFile
)
REBUILD = Endpoint(
    "rebuild", "POST", f"{_JOBS}/{{job_id}}/rebuild", "Make the ledger anew", _USER, LedgerReport, is_idempotent=True
)

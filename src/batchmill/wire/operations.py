"""The operations of batchmill's own API as data: path, scope, query, body and reply of each.

The routes of the native dialect and of the control socket, and the calls of the SDK, are made from this table.
Operations for the machine's user only are in `control/operations.py`.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from batchmill.types import JobView, LedgerReport, RemoteJob, RetryChange, Scope, Wait
from batchmill.wire.adapter_bundles import ADAPTER_MEDIA
from batchmill.wire.bundles import BUNDLE_MEDIA
from batchmill.wire.native import (
    PREFIX,
    Accepted,
    AliasInfo,
    Change,
    DeployReply,
    Estimated,
    FileInfo,
    FilePage,
    FunctionDetail,
    JobPage,
    KeyInfo,
    KeyList,
    ListFiles,
    ListJobs,
    MadeKey,
    Merge,
    ModelList,
    NewAlias,
    NewJob,
    NewKey,
    Planned,
    QuotaList,
    ReadResults,
    RemoteJobList,
    Restart,
    RevokeKey,
    Rollback,
    SealReport,
    Settlement,
    StoreFile,
    VersionInfo,
    VersionList,
    VersionQuery,
    WatchJob,
    Work,
)
from batchmill.wire.native_models import (
    AdapterInfo,
    AdapterList,
    AdapterQuery,
    AdapterVersion,
    LlmChange,
    LlmEvents,
    LlmEventsQuery,
    LlmInfo,
    LlmList,
    LogPage,
    LogQuery,
    NewAdapter,
    NewLlm,
    QuarantinedRequests,
    UploadQuery,
)

T = TypeVar("T")

NOTHING: type[None] = type(None)
OCTETS, JSON_LINES, EVENTS = "application/octet-stream", "application/jsonl", "text/event-stream"
BINARY, TEXT = {"type": "string", "format": "binary"}, {"type": "string"}
_PARAMETER = re.compile(r"\{[a-z_]+(:path)?\}")


class Content(Struct, frozen=True):
    """A body or a reply that is not JSON of a struct."""

    media: str  # "text/event-stream"
    schema: dict[str, Any] = msgspec.field(default_factory=lambda: dict(BINARY))


class Endpoint(Struct, Generic[T], frozen=True):
    """One method of one path. `query` and `body` are structs; `body` may be a Content, which is read piece by piece."""

    name: str  # the operationId
    method: str
    path: str  # "/batchmill/v1/keys/{key_id}"
    summary: str
    scope: Scope
    reply: type[T]  # of a success, as JSON; bytes: see `media`
    query: type[Struct] | None = None
    body: type[Struct] | Content | None = None
    media: tuple[Content, ...] = ()  # the possible types of a reply of bytes
    status: int = 200
    is_idempotent: bool = False  # repeating it has no further effect; every GET is idempotent
    shown_by: Endpoint[Any] | None = None  # once it is done, repeating it raises InvalidTransition, and this shows it
    is_long: bool = False  # it has no time limit: the server may be silent while it works
    body_is_optional: bool = False

    def fill(self, *names: str) -> str:
        """Fill the path's parameters with these names."""
        values = iter(names)
        return _PARAMETER.sub(lambda match: quote(next(values), safe="/" if match[1] else ""), self.path)

    @property
    def is_repeatable(self) -> bool:
        return self.is_idempotent or self.method == "GET"

    @property
    def streams_events(self) -> bool:
        return any(each.media == EVENTS for each in self.media)


_READ, _SUBMIT, _ADMIN, _DEPLOY = Scope.READ, Scope.SUBMIT, Scope.ADMIN, Scope.DEPLOY
_FILE = Content(OCTETS)
_RESULTS = (Content(JSON_LINES), Content("text/csv"), Content("application/vnd.apache.parquet"), _FILE)

# -- jobs -------------------------------------------------------------------------------------------------------------

_JOBS = f"{PREFIX}/jobs"
_JOB = f"{_JOBS}/{{job_id}}"

CREATE_JOB = Endpoint(  # idempotent by the idempotency key that the SDK sends with each order
    "createJob", "POST", _JOBS, "Run the rows of uploaded files", _SUBMIT, Accepted, body=NewJob, status=201,
    is_idempotent=True,
)  # fmt: skip
LIST_JOBS = Endpoint("listJobs", "GET", _JOBS, "Jobs, the newest first", _READ, JobPage, query=ListJobs)
SHOW_JOB = Endpoint("showJob", "GET", _JOB, "One job", _READ, JobView)
AMEND_JOB = Endpoint(
    "amendJob", "PATCH", _JOB, "Change priority, deadline or budget", _SUBMIT, JobView, body=Change, is_idempotent=True
)
EXPLAIN_JOB = Endpoint(
    "explainJob", "GET", f"{_JOB}/wait", "Why the job waits, or is not faster", _READ, Wait
)  # fmt: skip
LIST_REMOTE_JOBS = Endpoint(
    "listRemoteJobs", "GET", f"{_JOB}/remote", "The provider jobs with its rows", _READ, RemoteJobList
)
SETTLE_REMOTE_JOB = Endpoint(
    "settleRemoteJob", "POST", f"{_JOB}/remote/{{tag}}", "Settle a submission with an unknown result", _SUBMIT,
    RemoteJob, body=Settlement,
)  # fmt: skip
VERIFY_JOB = Endpoint(
    "verifyJob", "POST", f"{_JOB}/verify", "Audit the record of which rows are done", _ADMIN, LedgerReport,
    is_idempotent=True, is_long=True,
)  # fmt: skip
REMOVE_JOB = Endpoint(
    "removeJob", "DELETE", _JOB, "Remove an ended job and its results", _SUBMIT, JobView, is_idempotent=True
)
PAUSE_JOB = Endpoint(
    "pauseJob", "POST", f"{_JOB}/pause", "Pause; rows in flight may finish", _SUBMIT, JobView, shown_by=SHOW_JOB
)
RESUME_JOB = Endpoint(
    "resumeJob", "POST", f"{_JOB}/resume", "Resume a paused job", _SUBMIT, JobView, shown_by=SHOW_JOB
)  # fmt: skip
CANCEL_JOB = Endpoint(
    "cancelJob", "POST", f"{_JOB}/cancel", "Run no more rows; finished ones are kept", _SUBMIT, JobView,
    shown_by=SHOW_JOB,
)  # fmt: skip
RETRY_JOB = Endpoint(
    "retryJob", "POST", f"{_JOB}/retry", "Run the rows again that failed", _SUBMIT, JobView, body=RetryChange,
    body_is_optional=True, shown_by=SHOW_JOB,
)  # fmt: skip
FAIL_ROWS = Endpoint(
    "failRows", "POST", f"{_JOB}/fail_rows", "Stop retrying rows that failed", _SUBMIT, JobView, shown_by=SHOW_JOB
)
WATCH_JOB = Endpoint(
    "watchJob", "GET", f"{_JOB}/events", "Stream views of a job until it is paused or has ended", _READ, bytes,
    query=WatchJob, media=(Content(EVENTS, TEXT),),
)  # fmt: skip
JOB_RESULTS = Endpoint(
    "jobResults", "GET", f"{_JOB}/results", "The results of a job: all, a range, or those so far", _READ,
    bytes, query=ReadResults, media=_RESULTS,
)  # fmt: skip
JOB_ERRORS = Endpoint(
    "jobErrors", "GET", f"{_JOB}/errors", "The rows that failed", _READ, bytes, media=(Content(JSON_LINES, TEXT),)
)
STEERING = {"pause": PAUSE_JOB, "resume": RESUME_JOB, "cancel": CANCEL_JOB, "fail_rows": FAIL_ROWS}

# -- previews, which run nothing --------------------------------------------------------------------------------------

_PREVIEWS = f"{PREFIX}/previews"

VALIDATE = Endpoint(
    "validate", "POST", f"{_PREVIEWS}/validate", "Check every row; run none", _SUBMIT, SealReport, body=Work,
    is_idempotent=True, is_long=True,
)  # fmt: skip
PLAN = Endpoint(
    "plan", "POST", f"{_PREVIEWS}/plan", "Explain the order in which rows would run", _SUBMIT, Planned, body=Work,
    is_idempotent=True, is_long=True,
)  # fmt: skip
ESTIMATE = Endpoint(
    "estimate", "POST", f"{_PREVIEWS}/estimate", "Estimate tokens, cost and time", _SUBMIT, Estimated, body=Work,
    is_idempotent=True, is_long=True,
)  # fmt: skip

# -- files ------------------------------------------------------------------------------------------------------------

_FILES = f"{PREFIX}/files"
_ONE_FILE = f"{_FILES}/{{file_id}}"

STORE_FILE = Endpoint(
    "storeFile", "POST", _FILES, "Upload a file: the body is the file", _SUBMIT, FileInfo, query=StoreFile, body=_FILE,
    status=201, is_long=True,
)  # fmt: skip
LIST_FILES = Endpoint("listStoredFiles", "GET", _FILES, "Files, the newest first", _READ, FilePage, query=ListFiles)
SHOW_FILE = Endpoint("showFile", "GET", _ONE_FILE, "One file", _READ, FileInfo)
REMOVE_FILE = Endpoint("removeFile", "DELETE", _ONE_FILE, "Delete a file", _SUBMIT, NOTHING, status=204)
FILE_CONTENT = Endpoint(
    "fileContent", "GET", f"{_ONE_FILE}/content", "The bytes of a file, whole or a range", _READ, bytes, media=(_FILE,)
)

# -- models and deployed functions ------------------------------------------------------------------------------------

_MODELS = f"{PREFIX}/models"
_MODEL = f"{_MODELS}/{{name}}"
_ALIAS = f"{_MODEL}/aliases/{{alias}}"

LIST_MODELS = Endpoint("models", "GET", _MODELS, "The models that the caller may use", _READ, ModelList)
DEPLOY = Endpoint(
    "deploy", "POST", _MODELS, "Deploy a function: code that runs as the server's user", _DEPLOY, DeployReply,
    body=Content(BUNDLE_MEDIA), status=201, is_long=True,
)  # fmt: skip
SHOW_MODEL = Endpoint("model", "GET", _MODEL, "A deployed function, and how it is called", _READ, FunctionDetail)
MODEL_VERSIONS = Endpoint("modelVersions", "GET", f"{_MODEL}/versions", "Its versions", _READ, VersionList)
MODEL_DOCUMENT = Endpoint(
    "modelDocument", "GET", f"{_MODEL}/openapi.json", "Its OpenAPI document", _READ, dict[str, Any],
    media=(Content("application/json", {"type": "object"}),),
)  # fmt: skip
MODEL_LOG = Endpoint(
    "modelLog", "GET", f"{_MODEL}/log", "The output of building a version", _ADMIN, bytes,
    query=VersionQuery, media=(Content("text/plain"),),
)  # fmt: skip
MODEL_CALLS = Endpoint(
    "modelCalls", "GET", f"{_MODEL}/logs", "The output and tracebacks of its calls", _ADMIN, LogPage, query=LogQuery
)
ROLLBACK_MODEL = Endpoint(
    "rollbackModel", "POST", f"{_MODEL}/rollback", "Make an earlier version the latest", _DEPLOY, VersionInfo,
    body=Rollback, body_is_optional=True, is_long=True,
)  # fmt: skip
MERGE_MODEL = Endpoint(
    "mergeModel", "POST", f"{_MODEL}/merge", "Copy a branch's latest version to another", _DEPLOY, VersionInfo,
    body=Merge, is_long=True,
)  # fmt: skip
RESTART_MODEL = Endpoint(
    "restartModel", "POST", f"{_MODEL}/restart", "Make the latest version again, with new workers", _ADMIN, VersionInfo,
    body=Restart, body_is_optional=True, is_long=True,
)  # fmt: skip
SET_ALIAS = Endpoint(
    "setAlias", "PUT", _ALIAS, "Set the versions of an alias", _DEPLOY, AliasInfo, body=NewAlias,
    is_idempotent=True,
)  # fmt: skip
REMOVE_ALIAS = Endpoint("removeAlias", "DELETE", _ALIAS, "Remove an alias", _DEPLOY, VersionList)
REMOVE_MODEL = Endpoint(
    "removeModel", "DELETE", _MODEL, "Remove versions, or all of them", _DEPLOY, VersionList, query=VersionQuery
)

# -- language models and their adapters -------------------------------------------------------------------------------

_LLMS, _QUARANTINE = f"{PREFIX}/llms", f"{PREFIX}/quarantine"
_LLM = f"{_LLMS}/{{name}}"
_ADAPTERS = f"{PREFIX}/adapters"
_ADAPTER = f"{_ADAPTERS}/{{name:path}}"  # a name may contain a slash

DEPLOY_LLM = Endpoint("deployLlm", "POST", _LLMS, "Deploy a language model", _ADMIN, LlmInfo, body=NewLlm, status=201)
LIST_LLMS = Endpoint("llms", "GET", _LLMS, "The deployed language models", _READ, LlmList)
SHOW_LLM = Endpoint("llm", "GET", _LLM, "A language model, and the state of its engine", _READ, LlmInfo)
CHANGE_LLM = Endpoint(
    "changeLlm", "PATCH", _LLM, "Change a deployment without downtime", _ADMIN, LlmInfo, body=LlmChange,
    is_idempotent=True,
)  # fmt: skip
REMOVE_LLM = Endpoint("removeLlm", "DELETE", _LLM, "Remove a deployment", _ADMIN, LlmInfo)
LLM_EVENTS = Endpoint(
    "llmEvents", "GET", f"{_LLM}/events", "The recent events of a deployment", _READ, LlmEvents, query=LlmEventsQuery
)
START_LLM = Endpoint("startLlm", "POST", f"{_LLM}/start", "Start an engine now", _ADMIN, LlmInfo, is_idempotent=True)
STOP_LLM = Endpoint(
    "stopLlm", "POST", f"{_LLM}/stop", "Stop answering until it is started again", _ADMIN, LlmInfo, is_idempotent=True
)
LIST_QUARANTINE = Endpoint("quarantine", "GET", _QUARANTINE, "Requests that killed engines", _READ, QuarantinedRequests)
CLEAR_QUARANTINE = Endpoint(
    "clearQuarantine", "DELETE", _QUARANTINE, "Release all of them", _ADMIN, QuarantinedRequests
)
CLEAR_QUARANTINED = Endpoint(
    "clearQuarantined", "DELETE", f"{_QUARANTINE}/{{digest}}", "Release one of them", _ADMIN, QuarantinedRequests
)
REGISTER_ADAPTER = Endpoint(
    "registerAdapter", "POST", _ADAPTERS, "Register an adapter and fetch it", _ADMIN, AdapterInfo,
    body=NewAdapter, status=202,
)  # fmt: skip
UPLOAD_ADAPTER = Endpoint(
    "uploadAdapter", "POST", _ADAPTER, "Upload an adapter: the body is its archive", _ADMIN, AdapterInfo,
    query=UploadQuery, body=Content(ADAPTER_MEDIA), status=201, is_long=True,
)  # fmt: skip
LIST_ADAPTERS = Endpoint(
    "listAdapters", "GET", _ADAPTERS, "The adapters that the caller may use", _READ, AdapterList, query=AdapterQuery
)
SHOW_ADAPTER = Endpoint("showAdapter", "GET", _ADAPTER, "One adapter", _READ, AdapterInfo, query=AdapterVersion)
REMOVE_ADAPTER = Endpoint(
    "removeAdapter", "DELETE", _ADAPTER, "Remove a version, or all; jobs that use it keep it", _ADMIN, AdapterList,
    query=AdapterVersion,
)  # fmt: skip

# -- keys and quotas --------------------------------------------------------------------------------------------------

_KEYS = f"{PREFIX}/keys"

CREATE_KEY = Endpoint(
    "createKey", "POST", _KEYS, "Create a key; it is shown only once", _ADMIN, MadeKey, body=NewKey, status=201
)
LIST_KEYS = Endpoint("listKeys", "GET", _KEYS, "Keys of the project", _ADMIN, KeyList)
REVOKE_KEY = Endpoint(
    "revokeKey", "DELETE", f"{_KEYS}/{{key_id}}", "Revoke a key at once", _ADMIN, KeyInfo, query=RevokeKey,
    is_idempotent=True,
)  # fmt: skip
LIST_QUOTAS = Endpoint(
    "listQuotas", "GET", f"{PREFIX}/quotas", "The use and the limits of the project's quotas", _READ, QuotaList
)

"""Every operation of the server as a typed request: one function an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from batchmill.client.messages import HttpRequest, TypedRequest
from batchmill.types import JobView, LedgerReport, RemoteJob, RetryChange, Wait
from batchmill.wire import operations as table
from batchmill.wire.bundles import BUNDLE_MEDIA
from batchmill.wire.native import (
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
    MadeKey,
    Merge,
    ModelList,
    NewAlias,
    NewJob,
    NewKey,
    Planned,
    QuotaList,
    RemoteJobList,
    Restart,
    Rollback,
    SealReport,
    Settlement,
    VersionInfo,
    VersionList,
    Work,
)
from batchmill.wire.native_models import LogPage, LogQuery
from batchmill.wire.operations import Endpoint

T = TypeVar("T")
Steering = Literal["pause", "resume", "cancel", "fail_rows"]


def typed_request(
    endpoint: Endpoint[T],
    *names: str,
    body: Struct | None = None,
    headers: Mapping[str, str] | None = None,
    **query: object,
) -> TypedRequest[T]:
    """A call of an operation: `names` fill its path; None is left out of the query."""
    return TypedRequest(request(endpoint, *names, body=body, headers=headers, **query), endpoint.reply)


def request(
    endpoint: Endpoint[Any],
    *names: str,
    body: Struct | None = None,
    headers: Mapping[str, str] | None = None,
    **query: object,
) -> HttpRequest:
    """As `typed_request`, for a streamed reply."""
    sent_headers = dict(headers or {}) | ({} if body is None else {"content-type": "application/json"})
    return HttpRequest(
        endpoint.method, endpoint.fill(*names), {name: _text(each) for name, each in query.items() if each is not None},
        sent_headers, None if body is None else msgspec.json.encode(body), is_repeatable=endpoint.is_repeatable,
        is_long=endpoint.is_long, result_path=None if endpoint.shown_by is None else endpoint.shown_by.fill(*names),
    )  # fmt: skip


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def submit(job: NewJob, key: str) -> TypedRequest[Accepted]:
    """Args: key: the idempotency key."""
    return typed_request(table.CREATE_JOB, body=job, headers={"idempotency-key": key})


def show(job_id: str) -> TypedRequest[JobView]:
    return typed_request(table.SHOW_JOB, job_id)


def jobs(
    *, state: str | None, label: str | None, limit: int | None, after: str | None, model: str | None = None,
    since: float | None = None,
) -> TypedRequest[JobPage]:  # fmt: skip
    return typed_request(table.LIST_JOBS, state=state, label=label, model=model, since=since, limit=limit, after=after)


def steer(job_id: str, verb: Steering) -> TypedRequest[JobView]:
    return typed_request(table.STEERING[verb], job_id)


def retry(job_id: str, change: RetryChange) -> TypedRequest[JobView]:
    return typed_request(table.RETRY_JOB, job_id, body=change)


def remove(job_id: str) -> TypedRequest[JobView]:
    return typed_request(table.REMOVE_JOB, job_id)


def amend(job_id: str, change: Change) -> TypedRequest[JobView]:
    return typed_request(table.AMEND_JOB, job_id, body=change)


def explain(job_id: str) -> TypedRequest[Wait]:
    return typed_request(table.EXPLAIN_JOB, job_id)


def remote(job_id: str) -> TypedRequest[RemoteJobList]:
    return typed_request(table.LIST_REMOTE_JOBS, job_id)


def settle_remote(job_id: str, tag: str, remote_id: str | None) -> TypedRequest[RemoteJob]:
    return typed_request(table.SETTLE_REMOTE_JOB, job_id, tag, body=Settlement(remote_id))


def verify(job_id: str) -> TypedRequest[LedgerReport]:
    return typed_request(table.VERIFY_JOB, job_id)


def events(job_id: str, interval_s: float, last: str | None) -> HttpRequest:
    headers = {"accept": "text/event-stream"} | ({} if last is None else {"last-event-id": last})
    return request(table.WATCH_JOB, job_id, headers=headers, interval_s=interval_s)


def results(job_id: str) -> HttpRequest:
    return request(table.JOB_RESULTS, job_id)


def errors(job_id: str) -> HttpRequest:
    return request(table.JOB_ERRORS, job_id)


def partial(job_id: str, *, sampled: bool = False, numbered: bool = False) -> HttpRequest:
    """Gathering the rows first may take a while.

    Args:
        sampled: only those of the job's sample.
        numbered: each line begins with the number of its row and a tab.
    """
    query = {"partial": True, "sampled": sampled or None, "numbered": numbered or None}
    return replace(request(table.JOB_RESULTS, job_id, **query), is_long=True)


def validate(work: Work) -> TypedRequest[SealReport]:
    return typed_request(table.VALIDATE, body=work)


def plan(work: Work) -> TypedRequest[Planned]:
    return typed_request(table.PLAN, body=work)


def estimate(work: Work) -> TypedRequest[Estimated]:
    return typed_request(table.ESTIMATE, body=work)


def models() -> TypedRequest[ModelList]:
    return typed_request(table.LIST_MODELS)


def deploy(size_bytes: int) -> TypedRequest[DeployReply]:
    """The archive is the body."""
    return typed_request(table.DEPLOY, headers={"content-type": BUNDLE_MEDIA, "content-length": str(size_bytes)})


def model(name: str) -> TypedRequest[FunctionDetail]:
    return typed_request(table.SHOW_MODEL, name)


def model_calls(name: str, query: LogQuery) -> TypedRequest[LogPage]:
    return typed_request(table.MODEL_CALLS, name, **asdict(query))


def model_log(name: str, *, branch: str | None, version: str | None) -> HttpRequest:
    return request(table.MODEL_LOG, name, branch=branch, version=version)


def model_document(name: str) -> TypedRequest[dict[str, Any]]:
    return typed_request(table.MODEL_DOCUMENT, name)


def rollback(name: str, body: Rollback) -> TypedRequest[VersionInfo]:
    """Without a number a second one would go back further."""
    what = typed_request(table.ROLLBACK_MODEL, name, body=body)
    return what if body.number is None else replace(what, request=replace(what.request, is_repeatable=True))


def merge(name: str, body: Merge) -> TypedRequest[VersionInfo]:
    return typed_request(table.MERGE_MODEL, name, body=body)


def restart(name: str, body: Restart) -> TypedRequest[VersionInfo]:
    return typed_request(table.RESTART_MODEL, name, body=body)


def set_alias(name: str, alias: str, body: NewAlias) -> TypedRequest[AliasInfo]:
    return typed_request(table.SET_ALIAS, name, alias, body=body)


def remove_alias(name: str, alias: str) -> TypedRequest[VersionList]:
    return typed_request(table.REMOVE_ALIAS, name, alias)


def remove_model(name: str, *, branch: str | None, version: str | None) -> TypedRequest[VersionList]:
    return typed_request(table.REMOVE_MODEL, name, branch=branch, version=version)


def upload(filename: str, *, expires_s: float | None, size_bytes: int | None) -> TypedRequest[FileInfo]:
    """The file is the body, as it is."""
    headers = {"content-type": table.OCTETS}
    if size_bytes is not None:
        headers["content-length"] = str(size_bytes)
    return typed_request(table.STORE_FILE, headers=headers, filename=filename, expires_s=expires_s)


def files(*, limit: int | None, after: str | None) -> TypedRequest[FilePage]:
    return typed_request(table.LIST_FILES, limit=limit, after=after)


def file(file_id: str) -> TypedRequest[FileInfo]:
    return typed_request(table.SHOW_FILE, file_id)


def content(file_id: str) -> HttpRequest:
    return request(table.FILE_CONTENT, file_id)


def delete_file(file_id: str) -> TypedRequest[None]:
    return typed_request(table.REMOVE_FILE, file_id)


def create_key(key: NewKey) -> TypedRequest[MadeKey]:
    return typed_request(table.CREATE_KEY, body=key)


def keys() -> TypedRequest[KeyList]:
    return typed_request(table.LIST_KEYS)


def quotas() -> TypedRequest[QuotaList]:
    return typed_request(table.LIST_QUOTAS)


def revoke_key(key_id: str, *, with_minted: bool) -> TypedRequest[KeyInfo]:
    return typed_request(table.REVOKE_KEY, key_id, with_minted=with_minted or None)

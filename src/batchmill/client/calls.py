"""Every operation of the server as a request and what its reply is read as: one function an operation."""

from __future__ import annotations

from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from batchmill.client.messages import Ask, Request
from batchmill.types import JobView, LedgerReport, RemoteJob, Wait
from batchmill.wire.deploys import BUNDLE_MEDIA
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
    Settlement,
    VersionInfo,
    VersionList,
    Work,
)
from batchmill.wire.native_logs import LogPage, LogQuery
from batchmill.wire.previews import SealReport

T = TypeVar("T")
Steering = Literal["pause", "resume", "cancel", "retry", "fail_rows"]
NOTHING: type[None] = type(None)


def _path(*parts: str) -> str:
    return "/".join([PREFIX, *(quote(part, safe="") for part in parts)])


def _query(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _post(reply: type[T], path: str, body: Struct | None = None, headers: dict[str, str] | None = None) -> Ask[T]:
    """A POST that is not repeated once the server may have seen it."""
    told = dict(headers or {})
    if body is None:
        return Ask(Request("POST", path, headers=told, is_repeatable=False), reply)
    told["content-type"] = "application/json"
    return Ask(Request("POST", path, headers=told, body=msgspec.json.encode(body), is_repeatable=False), reply)


def submit(job: NewJob, key: str) -> Ask[Accepted]:
    """`key` is what the server knows a repeat by."""
    ask = _post(Accepted, _path("jobs"), job, {"idempotency-key": key})
    return Ask(msgspec.structs.replace(ask.request, is_repeatable=True), Accepted)


def show(job_id: str) -> Ask[JobView]:
    return Ask(Request("GET", _path("jobs", job_id)), JobView)


def jobs(
    *, state: str | None, label: str | None, limit: int | None, after: str | None, model: str | None = None,
    since: float | None = None,
) -> Ask[JobPage]:  # fmt: skip
    query = _query(state=state, label=label, model=model, since=since, limit=limit, after=after)
    return Ask(Request("GET", _path("jobs"), query), JobPage)


def steer(job_id: str, verb: Steering) -> Ask[JobView]:
    return _post(JobView, _path("jobs", job_id, verb))


def remove(job_id: str) -> Ask[JobView]:
    return Ask(Request("DELETE", _path("jobs", job_id)), JobView)


def amend(job_id: str, change: Change) -> Ask[JobView]:
    """Setting the same values twice is setting them once."""
    body, headers = msgspec.json.encode(change), {"content-type": "application/json"}
    return Ask(Request("PATCH", _path("jobs", job_id), headers=headers, body=body), JobView)


def explain(job_id: str) -> Ask[Wait]:
    return Ask(Request("GET", _path("jobs", job_id, "wait")), Wait)


def remote(job_id: str) -> Ask[RemoteJobList]:
    return Ask(Request("GET", _path("jobs", job_id, "remote")), RemoteJobList)


def settle_remote(job_id: str, tag: str, remote_id: str | None) -> Ask[RemoteJob]:
    return _post(RemoteJob, _path("jobs", job_id, "remote", tag), Settlement(remote_id))


def verify(job_id: str) -> Ask[LedgerReport]:
    ask = _post(LedgerReport, _path("jobs", job_id, "verify"))
    return Ask(msgspec.structs.replace(ask.request, is_repeatable=True, is_long=True), LedgerReport)


def events(job_id: str, interval_s: float, last: str | None) -> Request:
    headers = {"accept": "text/event-stream"} | ({} if last is None else {"last-event-id": last})
    return Request("GET", _path("jobs", job_id, "events"), _query(interval_s=interval_s), headers)


def results(job_id: str) -> Request:
    return Request("GET", _path("jobs", job_id, "results"))


def errors(job_id: str) -> Request:
    return Request("GET", _path("jobs", job_id, "errors"))


def partial(job_id: str) -> Request:
    """Gathering the rows first may take a while."""
    return Request("GET", _path("jobs", job_id, "results"), {"partial": "true"}, is_long=True)


def validate(work: Work) -> Ask[SealReport]:
    return _preview(SealReport, "validate", work)


def plan(work: Work) -> Ask[Planned]:
    return _preview(Planned, "plan", work)


def estimate(work: Work) -> Ask[Estimated]:
    return _preview(Estimated, "estimate", work)


def _preview(reply: type[T], what: str, work: Work) -> Ask[T]:
    """Nothing is changed by looking twice; every row is read, so it takes as long as it takes."""
    ask = _post(reply, _path("previews", what), work)
    return Ask(msgspec.structs.replace(ask.request, is_repeatable=True, is_long=True), reply)


def models() -> Ask[ModelList]:
    return Ask(Request("GET", _path("models")), ModelList)


def deploy(size_bytes: int) -> Ask[DeployReply]:
    """The archive is the body. Making an environment takes as long as it takes."""
    headers = {"content-type": BUNDLE_MEDIA, "content-length": str(size_bytes)}
    return Ask(Request("POST", _path("models"), headers=headers, is_repeatable=False, is_long=True), DeployReply)


def model(name: str) -> Ask[FunctionDetail]:
    return Ask(Request("GET", _path("models", name)), FunctionDetail)


def model_calls(name: str, query: LogQuery) -> Ask[LogPage]:
    told = _query(**{each: getattr(query, each) for each in query.__struct_fields__})
    return Ask(Request("GET", _path("models", name, "logs"), told), LogPage)


def model_log(name: str, *, branch: str | None, version: str | None) -> Request:
    return Request("GET", _path("models", name, "log"), _query(branch=branch, version=version))


def model_document(name: str) -> Ask[dict[str, Any]]:
    return Ask(Request("GET", _path("models", name, "openapi.json")), dict[str, Any])


def rollback(name: str, asked: Rollback) -> Ask[VersionInfo]:
    """Without a number a second one would go back further."""
    ask = _long(VersionInfo, _path("models", name, "rollback"), asked)
    return ask if asked.number is None else Ask(msgspec.structs.replace(ask.request, is_repeatable=True), VersionInfo)


def merge(name: str, asked: Merge) -> Ask[VersionInfo]:
    return _long(VersionInfo, _path("models", name, "merge"), asked)


def restart(name: str, asked: Restart) -> Ask[VersionInfo]:
    return _long(VersionInfo, _path("models", name, "restart"), asked)


def _long(reply: type[T], path: str, body: Struct) -> Ask[T]:
    """Workers of the new version are up before the answer comes."""
    ask = _post(reply, path, body)
    return Ask(msgspec.structs.replace(ask.request, is_long=True), reply)


def set_alias(name: str, alias: str, asked: NewAlias) -> Ask[AliasInfo]:
    body, headers = msgspec.json.encode(asked), {"content-type": "application/json"}
    return Ask(Request("PUT", _path("models", name, "aliases", alias), headers=headers, body=body), AliasInfo)


def remove_alias(name: str, alias: str) -> Ask[VersionList]:
    return Ask(Request("DELETE", _path("models", name, "aliases", alias), is_repeatable=False), VersionList)


def remove_model(name: str, *, branch: str | None, version: str | None) -> Ask[VersionList]:
    query = _query(branch=branch, version=version)
    return Ask(Request("DELETE", _path("models", name), query, is_repeatable=False), VersionList)


def upload(filename: str, *, expires_s: float | None, size_bytes: int | None) -> Ask[FileInfo]:
    """The file is the body, as it is."""
    headers = {"content-type": "application/octet-stream"}
    if size_bytes is not None:
        headers["content-length"] = str(size_bytes)
    query = _query(filename=filename, expires_s=expires_s)
    return Ask(Request("POST", _path("files"), query, headers, is_repeatable=False, is_long=True), FileInfo)


def files(*, limit: int | None, after: str | None) -> Ask[FilePage]:
    return Ask(Request("GET", _path("files"), _query(limit=limit, after=after)), FilePage)


def file(file_id: str) -> Ask[FileInfo]:
    return Ask(Request("GET", _path("files", file_id)), FileInfo)


def content(file_id: str) -> Request:
    return Request("GET", _path("files", file_id, "content"))


def delete_file(file_id: str) -> Ask[None]:
    return Ask(Request("DELETE", _path("files", file_id), is_repeatable=False), NOTHING)


def create_key(key: NewKey) -> Ask[MadeKey]:
    return _post(MadeKey, _path("keys"), key)


def keys() -> Ask[KeyList]:
    return Ask(Request("GET", _path("keys")), KeyList)


def quotas() -> Ask[QuotaList]:
    return Ask(Request("GET", _path("quotas")), QuotaList)


def revoke_key(key_id: str, *, with_minted: bool) -> Ask[KeyInfo]:
    query = _query(with_minted="true" if with_minted else None)
    return Ask(Request("DELETE", _path("keys", key_id), query), KeyInfo)

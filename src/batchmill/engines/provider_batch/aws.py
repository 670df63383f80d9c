"""AWS: endpoints, credentials, signed calls, and files in S3."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import msgspec
from botocore.exceptions import BotoCoreError
from botocore.session import Session
from msgspec import Struct
from msgspec.structs import replace

from batchmill.engines import clock
from batchmill.engines.connections import Connections, FileRange
from batchmill.engines.provider_batch.provider import (
    JobRefused,
    Out,
    ProviderClient,
    ProviderRefusal,
    SignedCall,
    TryAgain,
)
from batchmill.engines.provider_batch.settings import argument
from batchmill.engines.retry import redact, requested_wait_s
from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, ModelFailed, RouteFailed
from batchmill.models import redaction, secrets
from batchmill.models.connectors.rendering import Rendered, Renderer
from batchmill.models.connectors.signing import sign
from batchmill.types import ModelSpec
from batchmill.types.connectors import BATCH_PREDICT
from batchmill.wire.error_statuses import decode_error

KEY_NAMES = ("access_key", "secret_key", "session_token")
ARGUMENTS = frozenset({*KEY_NAMES, "region", "s3", "s3_endpoint", "queue_rest_s"})
QUEUE_DELAY_S = 600.0  # before a job that exceeded the account's quota is submitted again

_THROTTLED = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "ProvisionedThroughputExceededException",
        "BandwidthLimitExceeded",
        "SlowDown",
    }
)
_AUTH = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AllAccessDisabled",
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "InvalidToken",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
        "OptInRequired",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_PASSING = frozenset({"RequestTimeout", "RequestTimeoutException", "InternalError", "InternalFailure"})
QUEUE_FULL = frozenset({"ServiceQuotaExceededException", "ResourceLimitExceeded", "LimitExceededException"})


class AwsCredentials(Struct, frozen=True):
    """The keys that sign a call."""

    access: str
    secret: str
    token: str | None = None


class Account:
    """The credentials and the region of a model."""

    def __init__(self, model: ModelSpec) -> None:
        """Raises: ModelFailed if the region is unknown."""
        self._model = model
        self._may_look = model.connector is None or model.connector.is_trusted
        self._session: Session | None = None
        self.region = self._region()
        self.queue_rest_s = argument(model, "queue_rest_s", QUEUE_DELAY_S, least=0)

    def argument(self, *names: str) -> str | None:
        """The engine argument or connector parameter with one of these names."""
        for name in names:
            value = self._model.engine_args.get(name)
            if value is None and self._model.connector is not None:
                value = self._model.connector.parameters.get(name)
            if value is not None:
                return str(value)
        return None

    def needed(self, *names: str, what: str) -> str:
        """As `argument`. Raises: ModelFailed if it is missing."""
        value = self.argument(*names)
        if not value:
            provider = self._model.provider
            raise ModelFailed(f"{provider} needs {what}: give the engine argument {names[0]}", code="missing_argument")
        return value

    async def keys(self) -> AwsCredentials:
        """The current keys. Raises: ModelFailed if there are none."""
        references = self._references()
        if references:
            credentials = {name: secrets.resolve(reference).reveal() for name, reference in references.items()}
            return AwsCredentials(
                credentials["access_key"], credentials["secret_key"], credentials.get("session_token")
            )
        return await asyncio.to_thread(self._look)

    def _references(self) -> dict[str, str]:
        connector = self._model.connector
        given = dict(self._model.engine_args) if connector is None else dict(connector.credential)
        references = {name: str(given[name]) for name in KEY_NAMES if given.get(name)}
        if references and not {"access_key", "secret_key"} <= references.keys():
            raise ModelFailed("access_key and secret_key must both be set", code="missing_secret")
        if not references and not self._may_look:
            raise ModelFailed(
                "the connector has no access_key and secret_key in its credential; a roleArn alone opens nothing here",
                code="missing_secret",
            )
        return references

    def _look(self) -> AwsCredentials:
        """Look up keys as AWS's tools do: variables, profiles, the machine's role. May call and block."""
        try:
            if self._session is None:
                self._session = Session()
            credentials = self._session.get_credentials()
            frozen = None if credentials is None else credentials.get_frozen_credentials()
        except BotoCoreError as error:
            raise ModelFailed(f"no AWS credentials: {error}", code="missing_secret") from None
        if frozen is None or not frozen.access_key or not frozen.secret_key:
            raise ModelFailed(
                "no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role, or give "
                'access_key and secret_key as "env:NAME"',
                code="missing_secret",
            )
        for each in (frozen.secret_key, frozen.token):
            if each:
                redaction.learn(each)
        return AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token)

    def _region(self) -> str:
        region = self.argument("region")
        connector = self._model.connector
        if region is None and connector is not None and "region" in connector.credential:
            region = secrets.resolve(connector.credential["region"], key="region").reveal()
        if region is None and self._may_look:
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not region or not region.replace("-", "").isalnum():
            raise ModelFailed(f"AWS needs a region, not {region!r}: give the engine argument region", code="no_region")
        return region

    def refused(self, refusal: ProviderRefusal) -> JobRefused:
        """The error of a job whose submission was refused."""
        is_full = refusal.reason in QUEUE_FULL
        return JobRefused(refusal.message, retry_after_s=self.queue_rest_s if is_full else None)

    @property
    def domain(self) -> str:
        return "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"

    def endpoint(self, host: str, *, path: str) -> str:
        """The URL of a service without a trailing slash. `path` ends the URL of a connector's action."""
        if self._model.connector is None:
            return (self._model.base_url or f"https://{host}.{self.region}.{self.domain}").rstrip("/")
        action = self._model.connector.action(BATCH_PREDICT)
        if action is None:
            text = f"the connector {self._model.connector.name!r} has no batch_predict action"
            raise ModelFailed(text, code="missing_action")
        bare = Renderer(self._model.connector, replace(action, request_body="{}", headers={}))
        return bare.compose({}, {}).url.partition("?")[0].rstrip("/").removesuffix(path)


class Signed:
    """Calls of one service, each signed when it is sent."""

    def __init__(self, account: Account, service: str, connections: Connections) -> None:
        self._account = account
        self._service = service
        self.calls = ProviderClient(connections, self._sign, classify=classify)

    async def _sign(self, out: Out) -> SignedCall:
        keys = await self._account.keys()
        rendered = Rendered(out.method, out.url, dict(out.headers), out.body)
        try:
            signed = sign(
                rendered,
                service=self._service,
                region=self._account.region,
                access_key=keys.access,
                secret_key=keys.secret,
                session_token=keys.token,
                at=datetime.fromtimestamp(clock.now(), UTC),
                body_sha256=out.sha256,
            )
        except InvalidInput as error:
            raise ModelFailed(error.message, code=error.code) from None
        secrets = [keys.secret, keys.access, *([keys.token] if keys.token else [])]
        return SignedCall(replace(out, headers=signed.headers), [each.encode() for each in secrets])


class JsonService:
    """A JSON service that names its operation in a header: `SageMaker.CreateTransformJob`."""

    def __init__(self, signed: Signed, url: str, prefix: str) -> None:
        self._signed = signed
        self._url = url
        self._prefix = prefix

    async def call(self, action: str, order: Mapping[str, Any]) -> bytes:
        """The reply's bytes. Raises as `ProviderClient.call`."""
        headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": f"{self._prefix}.{action}"}
        answer = await self._signed.calls.call("POST", self._url, msgspec.json.encode(order), headers=headers)
        return answer.data


def classify(status: int, headers: Mapping[str, str], data: bytes) -> BatchmillError | None:
    """Classify an error reply of AWS. None if the reply is not from AWS."""
    code, message = error_of(headers, data)
    if status == 301 or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        region = headers.get("x-amz-bucket-region", "another region")
        return RouteFailed(f"the bucket is in {region}, not in the configured region: {message or code}")
    if not code:
        return None
    text = redact(f"{message} ({code})" if message else code)
    if status == 429 or code in _THROTTLED:
        return TryAgain(text, retry_after_s=requested_wait_s(headers, clock.now()), is_unseen=True)
    if code in _AUTH:
        return AuthRefused(text)
    if status >= 500 or code in _PASSING:
        return TryAgain(text)
    return ProviderRefusal(status, code, text)


def error_of(headers: Mapping[str, str], data: bytes) -> tuple[str, str]:
    """The code and message of an error in JSON or XML; empty if there is none."""
    code = headers.get("x-amzn-errortype", "").partition(":")[0].rpartition("#")[2]
    if data.lstrip()[:1] == b"<":
        try:
            root = ElementTree.fromstring(data)
        except ElementTree.ParseError:
            return "", ""
        return root.findtext("Code") or "", root.findtext("Message") or ""
    error = decode_error(data)
    return code or error.code, error.message


def is_host(url: str) -> bool:
    """Whether a text is a host name."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


PUT_BYTES_MAX = 5 * 1024**3  # S3's limit for one PUT
PAGES_MAX = 100  # of a listing, with a thousand names each

_URI = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_*'().=/-]*))?")
_NAMESPACE = re.compile(r"\{[^}]*\}")


class S3Object(Struct, frozen=True):
    """An object in S3: bucket and key."""

    bucket: str
    key: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def below(self, name: str) -> S3Object:
        return S3Object(self.bucket, f"{self.key}/{name}".lstrip("/"))


def read_uri(uri: str) -> S3Object:
    """Parse s3://BUCKET/PREFIX. Raises: ModelFailed for anything else."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise ModelFailed(f"{uri[:200]!r} is not a location in S3: write s3://BUCKET/PREFIX", code="invalid_argument")
    return S3Object(match[1], (match[2] or "").strip("/"))


class S3:
    """The files of one account. Methods raise as `ProviderClient.call`."""

    def __init__(self, account: Account, connections: Connections) -> None:
        """The engine argument `s3_endpoint` sets another server with S3's API. Raises: ModelFailed."""
        self._region, self._domain = account.region, account.domain
        self._endpoint = (account.argument("s3_endpoint") or "").rstrip("/")
        if self._endpoint and not is_host(self._endpoint):
            raise ModelFailed(f"s3_endpoint {self._endpoint!r} is not an address", code="invalid_argument")
        self._calls = Signed(account, "s3", connections).calls

    async def put(self, target: S3Object, file: Path, size: int) -> None:
        """Upload a file, replacing an existing one. Raises: JobRefused if it is refused."""
        if size > PUT_BYTES_MAX:
            raise JobRefused(
                f"{size:,} bytes are too many for one upload to S3: set bytes_max to {PUT_BYTES_MAX} at most"
            )
        digest = await asyncio.to_thread(_digest, file)
        headers = {"Content-Type": "application/jsonl"}
        out = Out("PUT", self._url(target), headers=headers, parts=[FileRange(file, size)], sha256=digest)
        try:
            await self._calls.send(out)
        except ProviderRefusal as refusal:
            raise JobRefused(f"{target.uri} cannot be written: {refusal.message}") from None

    async def has(self, target: S3Object) -> bool:
        """Whether a file exists. It uses a listing, because a HEAD reply does not give the reason of a refusal."""
        return target.key in [each.key async for each in self.list(target)]

    async def list(self, target: S3Object) -> AsyncIterator[S3Object]:
        """The files whose keys begin with `target`."""
        query = {"list-type": "2", "prefix": target.key}
        for _ in range(PAGES_MAX):
            answer = await self._calls.call("GET", self._url(S3Object(target.bucket, ""), query))
            keys, token = _listing(answer.data)
            for key in keys:
                yield S3Object(target.bucket, key)
            if not token:
                return
            query["continuation-token"] = token
        raise JobRefused(f"there are more than {PAGES_MAX},000 files below {target.uri}")

    def lines(self, target: S3Object) -> AsyncIterator[list[bytes]]:
        """The lines of a file in groups of some hundreds; empty ones are skipped."""
        return self._calls.lines(self._url(target))

    async def delete(self, target: S3Object) -> None:
        """Delete a file; a missing one is not an error."""
        try:
            await self._calls.call("DELETE", self._url(target))
        except ProviderRefusal as refusal:
            if refusal.status != 404:
                raise

    async def delete_below(self, target: S3Object) -> None:
        """Delete every file below a prefix."""
        for each in [each async for each in self.list(S3Object(target.bucket, f"{target.key}/"))]:
            await self.delete(each)

    def _url(self, target: S3Object, query: dict[str, str] | None = None) -> str:
        path = quote(target.key, safe="/~-._")
        if self._endpoint:
            base = f"{self._endpoint}/{target.bucket}"
        elif "." in target.bucket:  # the TLS certificate of bucket hosts does not cover names with dots
            base = f"https://s3.{self._region}.{self._domain}/{target.bucket}"
        else:
            base = f"https://{target.bucket}.s3.{self._region}.{self._domain}"
        return f"{base}/{path}" + (f"?{urlencode(query, quote_via=quote)}" if query else "")


def _digest(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, "sha256").hexdigest()


def _listing(data: bytes) -> tuple[list[str], str]:
    """The keys in a ListObjectsV2 reply, and the token for the next page."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        raise TryAgain(f"the listing of a bucket is not XML: it begins {data[:100]!r}") from None
    keys, token = [], ""
    for each in root.iter():
        match _NAMESPACE.sub("", each.tag):
            case "Key":
                keys.append(each.text or "")
            case "NextContinuationToken":
                token = each.text or ""
    return keys, token

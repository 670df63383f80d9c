"""AWS Signature Version 4 with botocore's own signers, so that signatures equal those of any AWS client.

For every service but S3, the canonical path is encoded twice. botocore does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.connectors.rendering import Rendered

CONTENT_SHA256 = "x-amz-content-sha256"
PLAIN_PATHS = frozenset({"s3", "s3-outposts", "s3-object-lambda"})


class _SignerWithTime:
    """A botocore signer that takes the time, and the digest of a body that it does not see, from its caller."""

    digest: str | None = None

    def payload(self, request: AWSRequest) -> str:
        return self.digest or super().payload(request)  # type: ignore[misc]

    def add_auth_at(self: Any, request: AWSRequest, at: datetime) -> None:
        """As `add_auth`, for a given time."""
        request.context["timestamp"] = at.strftime(SIGV4_TIMESTAMP)
        self._modify_request_before_signing(request)
        to_sign = self.string_to_sign(request, self.canonical_request(request))
        self._inject_signature_to_request(request, self.signature(to_sign, request))


class _Signer(_SignerWithTime, SigV4Auth):
    pass


class _S3Signer(_SignerWithTime, S3SigV4Auth):
    pass


def sign(
    rendered: Rendered,
    *,
    service: str,
    region: str,
    access_key: str,
    secret_key: str,
    session_token: str | None = None,
    at: datetime | None = None,
    body_sha256: str | None = None,
) -> Rendered:
    """Add the headers of the signature to a call.

    Args:
        at: the time, aware; None: now.
        body_sha256: the hex digest of a body that `rendered` does not contain, or UNSIGNED-PAYLOAD.
    """
    is_s3 = service in PLAIN_PATHS
    headers = {
        name: value
        for name, value in rendered.headers.items()
        if name.lower() not in (CONTENT_SHA256, "authorization", "x-amz-date", "x-amz-security-token")
    }
    has_sha256_header = any(name.lower() == CONTENT_SHA256 for name in rendered.headers)
    request = AWSRequest(rendered.method, rendered.url, headers, rendered.body or b"")
    # S3 allows unsigned bodies over TLS. This body is available, so it is signed.
    request.context["payload_signing_enabled"] = True
    keys = Credentials(access_key, secret_key, session_token or None)
    signer = (_S3Signer if is_s3 else _Signer)(keys, service, region)
    signer.digest = body_sha256
    if (has_sha256_header or body_sha256) and not is_s3:
        request.headers[CONTENT_SHA256] = signer.payload(request)
    signer.add_auth_at(request, at or datetime.now(UTC))
    return replace(rendered, headers=dict(request.headers.items()))


def sign_connector(
    rendered: Rendered, parameters: Mapping[str, str], credentials: Mapping[str, str], at: datetime | None
) -> Rendered:
    """Sign a call of a connector. Service and region come from its parameters, or else from its credentials.

    Raises: InvalidInput, `missing_credential`, for missing keys.
    """
    settings = {}
    for name, message in (
        ("access_key", "Missing credential"),
        ("secret_key", "Missing credential"),
        ("service_name", "Missing service name"),
        ("region", "Missing region"),
    ):
        sources = (credentials,) if name.endswith("_key") else (parameters, credentials)
        value = next((source[name] for source in sources if source.get(name)), None)
        if value is None:
            raise InvalidInput(message, code="missing_credential")
        settings[name] = value
    return sign(
        rendered,
        service=settings["service_name"],
        region=settings["region"],
        access_key=settings["access_key"],
        secret_key=settings["secret_key"],
        session_token=credentials.get("session_token"),
        at=at,
    )

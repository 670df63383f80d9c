"""The configuration of a store: endpoint and credentials come from the environment, by the store's own chain.

Amazon's chain has parts that obstore lacks: profiles, SSO, and the files in ~/.aws. For those botocore is used, if
nothing that obstore knows is in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from batchmill.errors import AuthRefused
from batchmill.optional import require

# Variables that name credentials which obstore finds by itself.
KNOWN_TO_OBSTORE = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
SKIPPED = ("AWS_SKIP_SIGNATURE",)  # of a public bucket
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
AWS_FILES = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
REFRESH = timedelta(minutes=5)  # how long credentials are used before botocore is asked again

Provider = Callable[[], dict[str, Any]]


class Access:
    """How a store is reached. `provider` is None where obstore finds the credentials."""

    def __init__(self, config: dict[str, str], provider: Provider | None, *, allow_http: bool) -> None:
        self.config, self.provider, self.allow_http = config, provider, allow_http


def find_access(scheme: str, environment: Mapping[str, str] = os.environ) -> Access:
    """Raises: AuthRefused if a profile has no credentials; InvalidConfig (`missing_dependency`)."""
    if scheme != "s3":
        return Access({}, None, allow_http=environment.get("STORAGE_EMULATOR_HOST", "").startswith("http:"))
    config, provider = {}, None
    endpoint = next((environment[name] for name in ENDPOINTS if environment.get(name)), "")
    if endpoint:
        config["endpoint"] = endpoint
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    has_own = any(
        environment.get(name) for name in (*KNOWN_TO_OBSTORE, *SKIPPED)
    )  # go before a profile, as in botocore
    if not has_own and (environment.get("AWS_PROFILE") or _has_files(environment)):
        provider, profile_region = require("batchmill.object_store.profiles:provide", "a profile of ~/.aws")()
        region = region or profile_region
    if region:
        config["region"] = region
    return Access(config, provider, allow_http=endpoint.startswith("http:"))


def _has_files(environment: Mapping[str, str]) -> bool:
    return any(Path(environment.get(name) or default).expanduser().is_file() for name, default in AWS_FILES)


def expires_at(*, now: datetime | None = None) -> datetime:
    """When credentials that botocore gave are asked for again."""
    return (now or datetime.now(UTC)) + REFRESH


def no_credentials(detail: str) -> AuthRefused:
    """The error for a store for which there are no credentials."""
    return AuthRefused(
        f"there are no credentials for the object store ({detail}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME and its key; for a public bucket "
        "AWS_SKIP_SIGNATURE=true",
        code="auth_error",
    )

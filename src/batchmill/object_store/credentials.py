"""How a store is reached: endpoint and credentials come from environment variables, by the store's own chain.

Amazon's chain has parts that obstore lacks: profiles, SSO, and the files in ~/.aws. For those botocore is used, if
nothing that obstore knows is in the environment. A worker has no such variables: the owner sends them with a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchmill.errors import AuthRefused
from batchmill.optional import require
from batchmill.types.connectors import Storage

# Scheme -> the variables that obstore reads. It takes them as settings, too.
READ_BY_OBSTORE = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME"),
        *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_SKIP_SIGNATURE"),
        *("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_REQUEST_PAYER"),
        *("AWS_METADATA_ENDPOINT", "AWS_IMDSV1_FALLBACK", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_UNSIGNED_PAYLOAD"),
    ),
    "gs": (
        *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE", "GOOGLE_BASE_URL"),
    ),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
        "AZURE_STORAGE_SAS_TOKEN",
        *("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID", "AZURE_CLIENT_ID"),
        *("AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST"),
        *("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_TOKEN", "AZURE_SKIP_SIGNATURE"),
        *("AZURE_STORAGE_USE_EMULATOR", "AZURE_USE_AZURE_CLI", "AZURE_MSI_ENDPOINT", "AZURE_OBJECT_ID"),
        *("AZURE_MSI_RESOURCE_ID", "AZURE_IDENTITY_ENDPOINT", "AZURE_ENDPOINT"),
    ),
}  # fmt: skip
PROFILE, CREDENTIALS_FILE, CONFIG_FILE = "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"
AWS_FILES = ((CREDENTIALS_FILE, "~/.aws/credentials"), (CONFIG_FILE, "~/.aws/config"))
# Of all stores. Proxies belong to them: a store may only be reached through one.
VARIABLES = frozenset(
    {
        *(name for names in READ_BY_OBSTORE.values() for name in names), PROFILE, CREDENTIALS_FILE, CONFIG_FILE,
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    }
)  # fmt: skip
# Of these, what everyone may read: it says where a store is, and not who reads it.
SETTINGS = frozenset(
    {
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS"),
        *("AWS_SKIP_SIGNATURE", "AWS_REQUEST_PAYER", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_UNSIGNED_PAYLOAD"),
        *("GOOGLE_SKIP_SIGNATURE", "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_SKIP_SIGNATURE"),
        "AZURE_STORAGE_USE_EMULATOR",
    }
)  # fmt: skip
# Credentials on every machine. Others, such as a path or a role of this machine, are of no use elsewhere.
CREDENTIALS = frozenset(
    {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
        *("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET"),
        *("AZURE_STORAGE_TENANT_ID", "AZURE_STORAGE_TOKEN", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"),
        "AZURE_TENANT_ID",
    }
)  # fmt: skip
# With one of these, obstore finds S3 credentials by itself, or needs none. They go before a profile, as in botocore.
FOUND_BY_OBSTORE = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
PROXIES = (("HTTPS_PROXY", "https_proxy"), ("HTTP_PROXY", "http_proxy"))
REFRESH = timedelta(minutes=5)  # how long credentials are used before botocore is asked again

Variables = Mapping[str, str]
Provider = Callable[[], dict[str, Any]]


class Access(Struct):
    """How a store is reached. `provider` is None where obstore finds the credentials."""

    config: dict[str, str]
    provider: Provider | None
    allow_http: bool  # the endpoint is not encrypted


def variables_of(environment: Variables) -> dict[str, str]:
    """The variables that stores are reached with, without all others."""
    return {name: environment[name] for name in sorted(VARIABLES & environment.keys())}


def settings_of(environment: Variables) -> dict[str, str]:
    """The variables that say where stores are; a URL with a password in it is none of them."""
    return {name: environment[name] for name in sorted(SETTINGS & environment.keys()) if "@" not in environment[name]}


def has_credentials(environment: Variables) -> bool:
    """Whether a variable leads to credentials, or says that none are needed."""
    whose = VARIABLES - SETTINGS - {name for names in PROXIES for name in names} - {"NO_PROXY", "no_proxy"}
    return any(environment.get(name) for name in (whose | CREDENTIALS))


def joined(given: Variables, own: Variables) -> dict[str, str]:
    """The variables that another process gives, where this one has no credentials of its own; else only the settings
    of the other.
    """
    variables = variables_of(own)
    return {**settings_of(given), **variables} if has_credentials(variables) else {**variables, **given}


def on_nodes(storage: Storage, *, with_credentials: bool) -> Storage:
    """A store for other machines. Roles, profiles and files of this one are of no use there."""
    credentials = {name: value for name, value in storage.credentials.items() if name in CREDENTIALS}
    return Storage(storage.url, settings_of(storage.environ), credentials if with_credentials else {})


@contextmanager
def environment_with(variables: Variables) -> Iterator[None]:
    """Give this process these variables for a while: a child process that works for one order at a time.

    Concurrency: one at a time.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def find_access(scheme: str, environment: Variables) -> Access:
    """Raises: AuthRefused if a profile has no credentials; InvalidConfig (`missing_dependency`)."""
    config = {name.lower(): environment[name] for name in READ_BY_OBSTORE[scheme] if environment.get(name)}
    provider = None
    needs_profile = not any(environment.get(name) for name in FOUND_BY_OBSTORE)
    if scheme == "s3" and needs_profile and (environment.get(PROFILE) or _has_files(environment)):
        provide = require("batchmill.object_store.profiles:provide", "a profile of ~/.aws")
        provider, region = provide(environment)
        if region and "aws_region" not in config and "aws_default_region" not in config:
            config["aws_region"] = region
    is_open = any(value.startswith("http:") for name, value in config.items() if "endpoint" in name or "url" in name)
    return Access(config, provider, allow_http=is_open or bool(environment.get("AZURE_STORAGE_USE_EMULATOR")))


def _has_files(environment: Variables) -> bool:
    return any(Path(environment.get(name) or default).expanduser().is_file() for name, default in AWS_FILES)


def expires_at() -> datetime:
    """When credentials that botocore gave are asked for again."""
    return datetime.now(UTC) + REFRESH


def no_credentials(detail: str) -> AuthRefused:
    """The error for a store for which there are no credentials."""
    return AuthRefused(
        f"there are no credentials for the object store ({detail}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME and its key; for a public bucket "
        "AWS_SKIP_SIGNATURE=true",
        code="auth_error",
    )

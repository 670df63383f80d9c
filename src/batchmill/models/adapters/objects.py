"""Downloads an adapter from an object store (s3://, gs:// or az://).

Needs obstore, which reads credentials and endpoints from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY …).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import obstore
from obstore import exceptions
from obstore.store import from_url

from batchmill.errors import AuthRefused, BatchmillError, InvalidInput, Unavailable
from batchmill.models.adapters.fetching import check_size, write_file
from batchmill.wire.adapter_bundles import FILES, check_names

LISTED_MAX = 1000  # objects below the prefix that are listed
TIMEOUT_S = 1800  # for one file
CONNECT_S = 10
RETRY_S = 60
NOT_FOUND = "404 Not Found"  # for a missing bucket, for which obstore has no error class


def download(source: str, folder: Path) -> None:
    """Download the files below `source` into `folder`. Raises: InvalidInput, AuthRefused, TooLarge, Unavailable."""
    try:
        store = from_url(
            source.rstrip("/"),
            client_options={
                "timeout": timedelta(seconds=TIMEOUT_S),
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "allow_http": any(name.startswith("AWS_ENDPOINT") for name in os.environ),
            },
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=RETRY_S)},
        )
        objects = next(iter(obstore.list(store, chunk_size=LISTED_MAX)), [])
        sizes = {each["path"]: each["size"] for each in objects}
        check_names(source, set(sizes))
        for name in FILES:
            check_size(name, sizes[name])
            write_file(folder, name, lambda each, write: _read(store, each, write))
    except exceptions.BaseError as error:
        raise _translate(source, error) from None


def _read(store: obstore.store.ObjectStore, name: str, write: Callable[[bytes], None]) -> None:
    for chunk in obstore.get(store, name).stream():
        write(bytes(chunk))


def _translate(source: str, error: exceptions.BaseError) -> BatchmillError:
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, exceptions.NotFoundError) or NOT_FOUND in message:
        return InvalidInput(f"there is nothing at {source}: {message}", code="unknown_adapter")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return AuthRefused(f"the object store refused {source}: {message}", code="store_refused")
    if isinstance(error, exceptions.UnknownConfigurationKeyError | exceptions.InvalidPathError):
        return InvalidInput(f"{source} cannot be read: {message}", code="invalid_source")
    return Unavailable(f"{source} could not be fetched: {message}", code="store_unavailable")

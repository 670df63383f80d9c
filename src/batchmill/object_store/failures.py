"""Translates what obstore raises. Its messages contain no credentials, but many lines: one is kept."""

from __future__ import annotations

import re

from obstore import exceptions

from batchmill.errors import AuthRefused, BatchmillError, Conflict, InputChanged, InvalidInput, Unavailable
from batchmill.object_store.credentials import no_credentials

# What obstore raises: besides its own classes those of Python, and for a file:// those of the file system.
ERRORS = (exceptions.BaseError, OSError, ValueError, NotImplementedError)
DETAIL_CHARS = 300
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "InvalidToken", "InvalidAccessKeyId")
_NO_CREDENTIALS = (
    "169.254.169.254",
    "metadata.google.internal",
    "http://169.254",
    "MissingToken",
    "InstanceCredential",
)
_REDIRECTED = "redirect without LOCATION"
_WITHOUT_RANGES = "non-partial response"  # a server that ignores Range
_LATER = {408, 409, 425, 429}  # statuses below 500 of requests that may succeed later


def translate(url: str, error: BaseException) -> BatchmillError:
    """One of our errors for an error of obstore: it names the object and the way out."""
    text = str(error)
    detail = _first_line(text)
    if any(mark in text for mark in _NO_CREDENTIALS):
        return no_credentials(f"{url}: {detail}")
    code, status = _match(_CODE, text), int(_match(_STATUS, text) or 0)
    if isinstance(error, FileNotFoundError | exceptions.NotFoundError) or status == 404:
        return missing(url, "bucket" if code == "NoSuchBucket" else "object")
    if isinstance(error, exceptions.AlreadyExistsError):
        return exists(url)
    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        return changed(url)
    if (
        isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | PermissionError)
        or status in (401, 403)
        or code in _EXPIRED
    ):
        return AuthRefused(
            f"the object store refused {url}: {code or detail}; give credentials that are valid and may use it, then "
            "try again",
            code="auth_error",
        )
    if (
        isinstance(error, exceptions.NotSupportedError | NotImplementedError)
        or status == 501
        or _WITHOUT_RANGES in text
    ):
        return InvalidInput(f"the object store of {url} cannot do this: {detail}", code="store_unsupported")
    is_refused = (300 <= status < 500 and status not in _LATER) or _REDIRECTED in text
    if isinstance(error, exceptions.InvalidPathError | exceptions.UnknownConfigurationKeyError | ValueError):
        is_refused = True
    if is_refused:
        return InvalidInput(
            f"the object store refused {url}: {code or detail}; {_hint(text, code)}", code="store_refused"
        )
    return unavailable(url, detail)


def missing(url: str, what: str = "object") -> InvalidInput:
    return InvalidInput(f"there is no {what} {url}: check its name, and the endpoint of the store", code="no_object")


def exists(url: str) -> Conflict:
    return Conflict(f"{url} exists, with other content: choose another name", code="object_exists")


def changed(url: str) -> InputChanged:
    return InputChanged(f"{url} changed since it was sealed; restore it, or start over with --restart")


def unavailable(url: str, detail: str) -> Unavailable:
    return Unavailable(
        f"the object store does not serve {url} at the moment ({detail}); try again later", code="store_unavailable"
    )


def _hint(text: str, code: str) -> str:
    if _REDIRECTED in text or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return "its bucket is in another region: set AWS_REGION"
    return "check the URL and the endpoint of the store"


def _match(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:DETAIL_CHARS]

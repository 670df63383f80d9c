"""Masks secrets in text that is stored or shown: logs, error messages, replies of services.

It knows every secret that this process has read, with its encoded forms, and patterns of common keys.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote, quote_plus

MASK = "***"
_MASK = MASK.encode()
CHARS_MIN = 8  # a shorter secret is likely to be part of something else
# Fields that ML Commons has among the credentials of AWS although they are not secret. Every ARN has a region.
OPEN = frozenset({"region", "service_name"})
LEARNT_MAX = 4096  # secrets; of more, the least recently read are masked only if they match a key pattern

# Patterns of common keys. The text before a key stays.
_KEY_PATTERN = re.compile(
    r"\b(?:sk|pk|rk|hf|gsk|xai)[-_][A-Za-z0-9_\-*.]{8,}"
    r"|\bwhsec_[A-Za-z0-9+/=]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"  # a JSON web token
    r"|(?<=\b[Bb]earer )(?=[^\s0-9.=/+_-]*[0-9.=/+_-])[^\s\"']{6,}"  # not for plain words
    r"|(?<=\b[Bb]asic )(?=[A-Za-z+/_-]*[0-9=])[A-Za-z0-9+/=_-]{8,}"
    r"|(?:(?<=[?&;]key=)|(?<=[?&;]sig=)|(?<=api_key=)|(?<=api-key=)|(?<=apikey=)|(?<=access_token=)"
    r"|(?<=X-Amz-Signature=)|(?<=X-Amz-Credential=)|(?<=X-Amz-Security-Token=)|(?<=Signature=))[^&\s\"'<>,;]+"
)

_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_userinfo(text: str) -> str:
    """The text with the credentials of its URLs masked: "https://***@host/simple"."""
    return _USERINFO.sub(MASK, text)


class _LearntSecrets:
    """The secrets of this process with their forms, the least recently read first."""

    def __init__(self) -> None:
        self._secrets: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()  # threads of the database also learn secrets
        self._texts: tuple[str, ...] = ()
        self._bytes: tuple[bytes, ...] = ()
        self._is_stale = False

    def learn(self, secret: str) -> None:
        with self._lock:
            forms = self._secrets.pop(secret, None)
            if forms is not None:
                self._secrets[secret] = forms
                return
            if not (forms := forms_of(secret)):
                return
            self._secrets[secret] = forms
            if len(self._secrets) > LEARNT_MAX:
                del self._secrets[next(iter(self._secrets))]
            self._is_stale = True

    @property
    def texts(self) -> tuple[str, ...]:
        """All forms, the longest first, because one may be part of another."""
        if self._is_stale:
            self._renew()
        return self._texts

    @property
    def bytes(self) -> tuple[bytes, ...]:
        """As `texts`, encoded."""
        if self._is_stale:
            self._renew()
        return self._bytes

    def _renew(self) -> None:
        with self._lock:
            self._texts = tuple(sorted({form for each in self._secrets.values() for form in each}, key=_by_length))
            self._bytes = tuple(form.encode() for form in self._texts)
            self._is_stale = False


def _by_length(form: str) -> tuple[int, str]:
    return -len(form), form


_known = _LearntSecrets()


def learn(secret: str) -> None:
    """Let `mask` mask this secret from now on."""
    _known.learn(secret)


def learn_named(name: str, secret: str) -> None:
    """As `learn`, for a secret of the vault with this name. Skips the `OPEN` fields of connectors."""
    if not (name.startswith("connector/") and name.rpartition("/")[2].partition(":")[0] in OPEN):
        learn(secret)


def without(data: bytes, secrets: Iterable[str]) -> bytes:
    """`data` with all forms of these secrets masked."""
    for form in sorted({form for secret in secrets for form in forms_of(secret)}, key=_by_length):
        data = data.replace(form.encode(), _MASK)
    return data


def mask(text: str) -> str:
    """`text` with all learnt secrets and everything that looks like a key masked."""
    return _KEY_PATTERN.sub(MASK, mask_known(text))


def mask_known(text: str) -> str:
    """`text` with learnt secrets masked. Text that only looks like a key may be data of a user, and stays."""
    for form in _known.texts:
        if form in text:
            text = text.replace(form, MASK)
    return text


def mask_lines(lines: list[bytes]) -> list[bytes]:
    """As `mask_known`, for lines that are stored. Nearly always returns the same list."""
    forms = _known.bytes
    if not forms:
        return lines
    together = b"\n".join(lines)
    known_forms = [form for form in forms if form in together]
    return [_without(line, known_forms) for line in lines] if known_forms else lines


def _without(line: bytes, forms: list[bytes]) -> bytes:
    for form in forms:
        line = line.replace(form, _MASK)
    return line


def known() -> tuple[bytes, ...]:
    """Every form of every learnt secret, the longest first."""
    return _known.bytes


def forms_of(secret: str) -> tuple[str, ...]:
    """The forms of a secret, the longest first: itself, and as encoded in URLs, JSON and base64.

    There are none for a secret that is too short to distinguish from other text.
    """
    if len(secret) < CHARS_MIN:
        return ()
    forms = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)}
    forms |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    forms |= {secret.replace("/", "\\/"), secret.encode().hex()}
    forms.update(_in_base64(secret.encode()))
    return tuple(sorted((each for each in forms if len(each) >= CHARS_MIN), key=len, reverse=True))


def _in_base64(secret: bytes) -> Iterator[str]:
    """The base64 forms of a secret at any position in the encoded bytes, such as in "Basic" of user:secret."""
    for shift in range(3):
        padded = b"\0" * shift + secret
        end = len(padded) * 8 // 6  # the next character has bits of the bytes that follow
        start = (0, 2, 3)[shift]  # earlier characters have bits of the bytes before
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(padded).decode()[start:end]


def print_exception(error: BaseException) -> None:
    """Print an error's traceback to standard error, with secrets masked."""
    sys.stderr.write(mask("".join(traceback.format_exception(error))))
    sys.stderr.flush()


class LogFilter(logging.Filter):
    """Masks secrets in log records, including tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = mask(record.getMessage()), None
        if record.exc_info and record.exc_info[1] is not None and record.exc_text is None:
            record.exc_text = mask("".join(traceback.format_exception(record.exc_info[1])).rstrip())
        if record.stack_info:
            record.stack_info = mask(record.stack_info)
        return True


def guard_logs() -> None:
    """Add a LogFilter to the root logger's handlers and to `logging.lastResort`."""
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None and not any(isinstance(each, LogFilter) for each in handler.filters):
            handler.addFilter(LogFilter())


MASK_BYTES = b"***"


class Scrubber:
    """Masks secrets in a stream of bytes. Bytes that may be the start of a secret are held back until the next chunk.

    Args:
        secrets: the longest first, from `redaction.known`.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self.secrets = secrets
        self._pending = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk, and return the bytes that may be sent now."""
        if not self.secrets:
            return chunk
        data = self._pending + chunk
        for secret in self.secrets:
            if secret in data:
                data = data.replace(secret, MASK_BYTES)
        pending = max(_prefix_length(data, secret) for secret in self.secrets)
        self._pending = data[len(data) - pending :]
        return data[: len(data) - pending]

    def rest(self) -> bytes:
        """The remaining bytes at the end of the stream."""
        pending, self._pending = self._pending, b""
        return pending


def _prefix_length(data: bytes, secret: bytes) -> int:
    """The number of bytes at the end of `data` that are a prefix of `secret`."""
    first = secret[:1]
    start = data.find(first, max(0, len(data) - len(secret) + 1))
    while start >= 0:
        if secret.startswith(data[start:]):
            return len(data) - start
        start = data.find(first, start + 1)
    return 0

"""Secrets taken out of text that is kept or shown: logs, error messages, what a service said.

One place knows every secret that this process has read, in the forms in which one travels, and what keys look like.
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
# What ML Commons lets stand among the credentials of AWS though it is none: in a region's every ARN.
OPEN = frozenset({"region", "service_name"})
LEARNT_MAX = 4096  # secrets; of more, those that were read longest ago are known by their looks alone

# What a key looks like, whoever wrote it there. The text before it stays.
_LOOKS = re.compile(
    r"\b(?:sk|pk|rk|hf|gsk|xai)[-_][A-Za-z0-9_\-*.]{8,}"
    r"|\bwhsec_[A-Za-z0-9+/=]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"  # a JSON web token
    r"|(?<=\b[Bb]earer )(?=[^\s0-9.=/+_-]*[0-9.=/+_-])[^\s\"']{6,}"  # words are no tokens
    r"|(?<=\b[Bb]asic )(?=[A-Za-z+/_-]*[0-9=])[A-Za-z0-9+/=_-]{8,}"
    r"|(?:(?<=[?&;]key=)|(?<=[?&;]sig=)|(?<=api_key=)|(?<=api-key=)|(?<=apikey=)|(?<=access_token=)"
    r"|(?<=X-Amz-Signature=)|(?<=X-Amz-Credential=)|(?<=X-Amz-Security-Token=)|(?<=Signature=))[^&\s\"'<>,;]+"
)

_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_userinfo(text: str) -> str:
    """The text with the credentials of its URLs masked: "https://***@host/simple"."""
    return _USERINFO.sub(MASK, text)


class _Known:
    """The secrets of this process, by the texts that would give them away; those that were read last come last."""

    def __init__(self) -> None:
        self._secrets: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()  # the threads of the database learn too
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
        """The longest first: one may be a part of another."""
        if self._is_stale:
            self._renew()
        return self._texts

    @property
    def bytes(self) -> tuple[bytes, ...]:
        """The same."""
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


_known = _Known()


def learn(secret: str) -> None:
    """From now on `mask` takes this secret out."""
    _known.learn(secret)


def learn_named(name: str, secret: str) -> None:
    """As `learn`, of a secret with a name of the vault's; what a connector calls one and is none stays text."""
    if not (name.startswith("connector/") and name.rpartition("/")[2].partition(":")[0] in OPEN):
        learn(secret)


def without(data: bytes, secrets: Iterable[str]) -> bytes:
    """`data` without these secrets, in whatever form."""
    for form in sorted({form for secret in secrets for form in forms_of(secret)}, key=_by_length):
        data = data.replace(form.encode(), _MASK)
    return data


def mask(text: str) -> str:
    """`text` without secrets: those that were learnt, in whatever form, and whatever looks like a key."""
    return _LOOKS.sub(MASK, mask_known(text))


def mask_known(text: str) -> str:
    """`text` without the secrets that were learnt; what merely looks like one may be somebody's data."""
    for form in _known.texts:
        if form in text:
            text = text.replace(form, MASK)
    return text


def mask_lines(lines: list[bytes]) -> list[bytes]:
    """As `mask_known`, for lines that are kept: nearly always the very same list."""
    forms = _known.bytes
    if not forms:
        return lines
    together = b"\n".join(lines)
    found = [form for form in forms if form in together]
    return [_without(line, found) for line in lines] if found else lines


def _without(line: bytes, forms: list[bytes]) -> bytes:
    for form in forms:
        line = line.replace(form, _MASK)
    return line


def known() -> tuple[bytes, ...]:
    """Every form of every secret that was learnt, the longest first."""
    return _known.bytes


def forms_of(secret: str) -> tuple[str, ...]:
    """The texts that give a secret away, the longest first: itself, and as URLs, JSON and base64 carry it.

    None for a secret that is too short to be told from other text.
    """
    if len(secret) < CHARS_MIN:
        return ()
    found = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)}
    found |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    found |= {secret.replace("/", "\\/"), secret.encode().hex()}
    found.update(_in_base64(secret.encode()))
    return tuple(sorted((form for form in found if len(form) >= CHARS_MIN), key=len, reverse=True))


def _in_base64(secret: bytes) -> Iterator[str]:
    """What base64 shows of a secret wherever it begins within the bytes that are encoded: "Basic" of user:secret."""
    for before in range(3):
        padded = b"\0" * before + secret
        whole = len(padded) * 8 // 6  # the next character holds bits of what follows
        skipped = (0, 2, 3)[before]  # characters that hold bits of what stands before
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(padded).decode()[skipped:whole]


def print_exception(error: BaseException) -> None:
    """An error's traceback on standard error, without secrets."""
    sys.stderr.write(mask("".join(traceback.format_exception(error))))
    sys.stderr.flush()


class LogFilter(logging.Filter):
    """Takes secrets out of whatever a handler writes, tracebacks too."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = mask(record.getMessage()), None
        if record.exc_info and record.exc_info[1] is not None and record.exc_text is None:
            record.exc_text = mask("".join(traceback.format_exception(record.exc_info[1])).rstrip())
        if record.stack_info:
            record.stack_info = mask(record.stack_info)
        return True


def guard_logs() -> None:
    """Have every handler that this process logs through take secrets out: those of the root, and the last resort."""
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None and not any(isinstance(each, LogFilter) for each in handler.filters):
            handler.addFilter(LogFilter())


MASK_BYTES = b"***"


class Scrubber:
    """One stream of bytes. What might be the beginning of a secret is kept back until the next piece.

    Args: secrets: what is taken out, the longest first: `redaction.known`.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self.secrets = secrets
        self._kept = b""

    def feed(self, piece: bytes) -> bytes:
        """What may be handed on now."""
        if not self.secrets:
            return piece
        data = self._kept + piece
        for secret in self.secrets:
            if secret in data:
                data = data.replace(secret, MASK_BYTES)
        keep = max(_beginning(data, secret) for secret in self.secrets)
        self._kept = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What is left at the end."""
        kept, self._kept = self._kept, b""
        return kept


def _beginning(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of `data` are the beginning of `secret`."""
    first = secret[:1]
    at = data.find(first, max(0, len(data) - len(secret) + 1))
    while at >= 0:
        if secret.startswith(data[at:]):
            return len(data) - at
        at = data.find(first, at + 1)
    return 0

"""Keys by reference: a spec says where a secret lies, and only the call that needs it reads it."""

from __future__ import annotations

import os
from pathlib import Path

from batchmill.errors import ModelFailed

SECRET_BYTES_MAX = 16 * 1024


class Secret:
    """A key in memory. It shows itself to nobody who does not ask with `reveal`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"


def resolve(reference: str) -> Secret:
    """The secret that "env:NAME" or "file:PATH" refers to.

    Raises: ModelFailed, naming the variable or file that is missing, empty or no single line of plain text.
    """
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        value, place = os.environ.get(name), f"the environment variable {name}"
    elif kind == "file" and name:
        value, place = _read(Path(name).expanduser()), f"the file {name}"
    else:
        # The text itself may be a key somebody pasted: it is not repeated.
        raise ModelFailed('a key is given as "env:NAME" or "file:PATH", never as itself', code="invalid_secret")
    if value is None:
        raise ModelFailed(f"{place} holds no key: it does not exist", code="missing_secret")
    value = value.strip()
    if not value:
        raise ModelFailed(f"{place} holds no key: it is empty", code="missing_secret")
    if not (value.isascii() and value.isprintable()):
        raise ModelFailed(f"{place} holds no key: it is not one line of plain text", code="invalid_secret")
    return Secret(value)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(SECRET_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFailed(f"the file {path} cannot be read: {error.strerror}", code="missing_secret") from None

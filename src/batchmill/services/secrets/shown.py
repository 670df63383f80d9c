"""Secrets as they can be shown, and the result of a rotation. It knows no database and no value of a secret."""

from __future__ import annotations

from msgspec import Struct


class SecretInfo(Struct, frozen=True):
    """A secret as it can be shown. `hint`: its last characters; empty for a short secret."""

    name: str
    hint: str
    created: float
    changed: float


class Rotated(Struct, frozen=True):
    """The result of a rotation."""

    rewrapped: int  # sealed values
    unreadable: list[str]  # the owners of values that no key can open
    keys_removed: int

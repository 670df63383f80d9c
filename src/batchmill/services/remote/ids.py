"""Ids of what callers make: 20 characters that stand in a URL as they are, and begin with a letter or digit."""

from __future__ import annotations

import base64
import secrets

ID_BYTES = 15


def new_id() -> str:
    """An id that nobody can guess. It never looks like a flag of a command line, nor like a route (`_search`)."""
    while True:
        found = base64.urlsafe_b64encode(secrets.token_bytes(ID_BYTES)).decode()
        if found[0].isalnum():
            return found

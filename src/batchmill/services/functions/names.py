"""Valid names of deployed functions, branches and aliases, and references to versions.

A reference is `NAME`, `NAME@3`, `NAME@prod` (an alias), `NAME@feat/x/3` or `NAME@feat/x/latest`: the last part is the
version.
"""

from __future__ import annotations

import re

from batchmill.errors import InvalidInput

MAIN, LATEST = "main", "latest"
NAME_CHARS_MAX = 100
SHOWN_CHARS = 80
_NAME = re.compile(r"[a-zA-Z0-9_]+")
_BRANCH = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.+=-]*(/[a-zA-Z0-9_][a-zA-Z0-9_.+=-]*)*")
_UNNAMED = re.compile(r"schema_[0-9a-f]{20}")
_ALIAS = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]*")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")

# First segments below /v1 (and /v2) that are paths of one of the public APIs.
RESERVED_NAMES = frozenset({
    "agents", "assistants", "audio", "batch", "batches", "chat", "chatkit", "classify", "completions",
    "containers", "content_provenance_checks", "conversations", "datasets", "decisions", "deployments",
    "detokenize", "embeddings", "endpoints", "evals", "events", "files", "fine_tuning", "images", "jobs",
    "keys", "live", "metrics", "models", "moderations", "organization", "pooling", "projects", "realtime",
    "rerank", "responses", "safety", "score", "skills", "stats", "threads", "tokenize", "uploads", "usage",
    "v1", "v2", "vaults", "vector_stores", "videos", "webhook_endpoints", "webhook_event_types", "webhooks",
})  # fmt: skip


def is_unnamed(name: str) -> bool:
    """Whether it is the name of a class that was deployed without one: see schema_classes."""
    return _UNNAMED.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Check and return the name of a function. Raises: InvalidInput."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
        raise InvalidInput(
            f"Names should be alphanumeric with underscores. {name[:SHOWN_CHARS]!r} is not, or is longer than "
            f"{NAME_CHARS_MAX} characters",
            code="invalid_name",
        )
    if is_unnamed(name):
        raise InvalidInput(
            f"{name!r} is a reserved name: a server names classes so that came without one", code="reserved_name"
        )
    if name in RESERVED_NAMES:
        raise InvalidInput(
            f"{name!r} is a reserved name: /v1/{name} is a path of another API; choose another name",
            code="reserved_name",
        )
    return name


def check_branch(branch: str) -> str:
    """Check and return the name of a branch. It has no `~`, which replaces `/` in URLs. Raises: InvalidInput."""
    is_version = _VERSION.fullmatch(branch) or branch == LATEST
    if not _BRANCH.fullmatch(branch) or len(branch) > NAME_CHARS_MAX or is_version:
        raise InvalidInput(
            f"the name of a branch has letters, digits and _ . + = - /, {NAME_CHARS_MAX} characters at most, and is "
            f"not a version; {branch[:SHOWN_CHARS]!r} is not such a name",
            code="invalid_branch",
        )
    return branch


def check_alias(alias: str) -> str:
    """Check and return the name of an alias. Raises: InvalidInput."""
    if not _ALIAS.fullmatch(alias) or len(alias) > NAME_CHARS_MAX or alias == LATEST:
        raise InvalidInput(
            f"an alias has letters, digits, _ and -, does not start with a digit and is not {LATEST!r}; "
            f"{alias[:SHOWN_CHARS]!r} is not an alias",
            code="invalid_alias",
        )
    return alias


def read_version(version: str) -> int | None:
    """Parse a version number; None for `latest` or an alias."""
    return int(version) if _VERSION.fullmatch(version) else None


def read_reference(text: str) -> tuple[str, str | None, str]:
    """Split a reference such as `NAME@feat/x/3` into name, branch (None if omitted) and version."""
    name, at, rest = text.partition("@")
    if not at:
        return name, None, LATEST
    branch, slash, version = rest.rpartition("/")
    return name, (branch if slash else None), version


def folder_of(branch: str) -> str:
    """The name of a branch as one segment of a path or URL."""
    return branch.replace("/", "~")

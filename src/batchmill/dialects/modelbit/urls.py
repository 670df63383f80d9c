"""The paths of deployments: `/v1/DEPLOYMENT[/BRANCH]/VERSION`, also behind `/:5000`, which the published client sends.

It takes no address, but a "region", and speaks plain HTTP only to one that contains ":5000": `127.0.0.1:PORT/:5000`.
"""

from __future__ import annotations

from batchmill.services.functions.names import RESERVED_NAMES

PREFIX = "/:5000"
SLASH = "~"  # for the "/" of a branch
# What an operation's name ends with -> its path.
PATHS = {
    "": "/v1/{deployment}/{version}",
    "OnBranch": "/v1/{deployment}/{branch}/{version}",
    "Prefixed": PREFIX + "/v1/{deployment}/{version}",
    "OnBranchPrefixed": PREFIX + "/v1/{deployment}/{branch}/{version}",
}


def is_ours(path: dict[str, str]) -> bool:
    """Its first word means nothing in another API."""
    return path["deployment"] not in RESERVED_NAMES


def is_certain(url: str) -> bool:
    """Nobody else has such paths."""
    return url.startswith(PREFIX)


def branch_of(path: dict[str, str]) -> str | None:
    """None: the path names none."""
    branch = path.get("branch")
    return None if branch is None else branch.replace(SLASH, "/")

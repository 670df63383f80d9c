"""The paths that a model answers: those of the OpenAI API for rows, and those that the configuration adds.

A path is compared with this list byte by byte, and never decoded, joined or normalised. A service gets only requests
with paths of this list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from batchmill.errors import InvalidInput
from batchmill.models.providers import PROVIDERS
from batchmill.types import ModelSpec
from batchmill.wire.rows.forms import CHAT, EMBEDDINGS, MESSAGES, MODERATIONS, URLS

PATHS_MAX = 64  # that the configuration may add to one model
PATH_CHARS_MAX = 200
SHOWN_CHARS = 100
# First segments of paths that a server of batchmill answers itself: a model may not have them.
RESERVED = ("batches", "files", "models", "uploads", "webhook_endpoints", "webhook_event_types")
SERVICE_PATHS = frozenset((*URLS, MODERATIONS))
# vLLM's other paths that run a model. The rest change the engine: adapters, profiles, caches, weights.
VLLM_PATHS = (MESSAGES, f"{MESSAGES}/count_tokens")

OPENAI_LIKE = ("openai", "azure")  # providers whose batches take rows of any of their paths
_PATH = re.compile(r"/v1(?:/[A-Za-z0-9][A-Za-z0-9._-]*)+")
_PROVIDER_PATHS = {
    "anthropic": frozenset((CHAT, MESSAGES)),
    "cohere": frozenset((EMBEDDINGS,)),
    "gemini": frozenset((CHAT, EMBEDDINGS)),
}


def paths_of(model: ModelSpec) -> frozenset[str] | None:
    """The paths that rows and calls of a model may have.

    None: any path below /v1, because the path has no effect: functions and connectors have only one kind of call, and
    the batches of some providers have bodies without paths.
    """
    if model.takes_columns:
        return None
    if model.needs_route:
        route_paths = [paths_of(route) for route in model.routes]
        limited = [paths for paths in route_paths if paths is not None]
        return frozenset().union(*limited) if len(limited) == len(route_paths) else None
    if model.provider is not None:
        if not PROVIDERS[model.provider].sends_paths:
            return None
        return _PROVIDER_PATHS.get(model.provider, SERVICE_PATHS.union(model.paths))
    return (frozenset(URLS) if model.traits.has_admin_paths else SERVICE_PATHS).union(model.paths)


def answers(model: ModelSpec, path: str) -> bool:
    """Whether a model answers a path."""
    paths = paths_of(model)
    return path in paths if paths is not None else path.startswith("/v1/")


def check_paths(paths: Sequence[str], *, has_admin_paths: bool) -> None:
    """Check the paths that the configuration adds. Raises: InvalidInput."""
    if len(paths) > PATHS_MAX:
        raise InvalidInput(f"paths has {len(paths)} entries; the maximum is {PATHS_MAX}")
    for path in paths:
        if len(path) > PATH_CHARS_MAX or not _PATH.fullmatch(path):
            raise InvalidInput(
                f"paths: {path[:SHOWN_CHARS]!r} is not a path such as /v1/images/generations: letters, digits, - _ . "
                f"and single slashes, {PATH_CHARS_MAX} characters at most"
            )
        if path.split("/")[2] in RESERVED:
            raise InvalidInput(f"paths: a server of batchmill answers {path} itself; leave it out")
        if has_admin_paths and path not in URLS and path not in VLLM_PATHS:
            raise InvalidInput(f"paths: {path} does not run a model of vLLM; these do: {', '.join(VLLM_PATHS)}")

"""The paths that a model answers: those of the OpenAI API that rows may have, and what the configuration adds.

A path is compared with this list as a whole and never decoded, joined or normalised: what differs by one byte is
another path, and a service sees none but those listed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from batchmill.errors import InvalidInput
from batchmill.models.providers import PROVIDERS
from batchmill.types import ModelSpec
from batchmill.wire.forms import CHAT, EMBEDDINGS, MESSAGES, MODERATIONS, URLS

PATHS_MAX = 64  # that the configuration adds to one model
PATH_CHARS_MAX = 200
SHOWN_CHARS = 100
# First words of paths that a server of batchmill answers itself: no model has them.
RESERVED = ("batches", "files", "models", "uploads", "webhook_endpoints", "webhook_event_types")
SERVICE_PATHS = frozenset((*URLS, MODERATIONS))
# What of vLLM's other paths runs a model. The rest of them change the engine: adapters, profiles, caches, weights.
VLLM_PATHS = (MESSAGES, f"{MESSAGES}/count_tokens")

OPENAI_LIKE = ("openai", "azure")  # providers whose batches take rows of any path that they have
_PATH = re.compile(r"/v1(?:/[A-Za-z0-9][A-Za-z0-9._-]*)+")
_OF_PROVIDER = {"anthropic": frozenset((CHAT, MESSAGES)), "cohere": frozenset((EMBEDDINGS,))}


def paths_of(model: ModelSpec) -> frozenset[str] | None:
    """The paths that rows and calls of a model may have.

    None: any below /v1, since a path leads nowhere: functions and connectors are called in one way only, and the bodies
    of some providers' batches stand alone.
    """
    if model.takes_columns:
        return None
    if model.needs_route:
        ways = [paths_of(route) for route in model.routes]
        known = [way for way in ways if way is not None]
        return frozenset().union(*known) if len(known) == len(ways) else None
    if model.provider is not None:
        if not PROVIDERS[model.provider].sends_paths:
            return None
        return _OF_PROVIDER.get(model.provider, SERVICE_PATHS.union(model.paths))
    return (frozenset(URLS) if model.traits.has_admin_paths else SERVICE_PATHS).union(model.paths)


def answers(model: ModelSpec, path: str) -> bool:
    """Whether a model answers a path."""
    known = paths_of(model)
    return path in known if known is not None else path.startswith("/v1/")


def check_paths(paths: Sequence[str], *, has_admin_paths: bool) -> None:
    """Refuse what the configuration may not add. Raises: InvalidInput."""
    if len(paths) > PATHS_MAX:
        raise InvalidInput(f"paths has {len(paths)} entries, and a model may have {PATHS_MAX}")
    for path in paths:
        if len(path) > PATH_CHARS_MAX or not _PATH.fullmatch(path):
            raise InvalidInput(
                f"paths: {path[:SHOWN_CHARS]!r} is no path such as /v1/images/generations: letters, digits, - _ . and "
                f"single slashes, {PATH_CHARS_MAX} characters at most"
            )
        if path.split("/")[2] in RESERVED:
            raise InvalidInput(f"paths: a server of batchmill answers {path} itself; leave it out")
        if has_admin_paths and path not in URLS and path not in VLLM_PATHS:
            raise InvalidInput(f"paths: {path} does not run a model of vLLM; there are {', '.join(VLLM_PATHS)}")

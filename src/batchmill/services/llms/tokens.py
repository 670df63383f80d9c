"""Tokens for a model hub: kept encrypted, and referred to by settings and models. None is ever shown.

A deployment's is llm/ID/hf_token and goes with it. One of a job is llm/token-DIGEST/hf_token, the same for all jobs of
a project that bring it; it goes once no unfinished job needs it and none has brought it for a while.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.secrets import KINDS, flaw_of
from batchmill.ports import Clock
from batchmill.services.llms import records
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.types import LlmSettings

PREFIX, OF_JOBS, END = "llm/", "llm/token-", "/hf_token"
VARIABLE = "HF_TOKEN"  # where an engine looks for it
REFERENCE = "secret:"
KEPT_S = 7 * 86_400.0  # a job that has ended may be tried again for so long
DIGEST_CHARS = 32


class HubTokens:
    def __init__(self, database: Database, vault: Vault, clock: Clock) -> None:
        self._database, self._vault, self._clock = database, vault, clock

    async def keep(self, project: str, settings: LlmSettings) -> LlmSettings:
        """The settings of a job with a reference in the place of their token. Raises: InvalidInput."""
        if settings.hf_token is None:
            return settings
        name = _name_for_jobs(project, _check(settings.hf_token))
        await self._vault.change({name: settings.hf_token}, project=project)
        return replace(settings, hf_token=f"{REFERENCE}{name}")

    def split(
        self, deployment_id: str, settings: LlmSettings, *, is_trusted: bool
    ) -> tuple[LlmSettings, dict[str, str]]:
        """The settings of a deployment as they are kept, and the token that goes to the vault. Raises: InvalidInput."""
        token = settings.hf_token
        if token is None or (is_trusted and is_reference(token)):
            return settings, {}
        name = f"{PREFIX}{deployment_id}{END}"
        return replace(settings, hf_token=f"{REFERENCE}{name}"), {name: _check(token)}

    async def unused(self, names: Iterable[str]) -> list[str]:
        """Those tokens that no unfinished job refers to."""
        wanted = sorted(names)
        used = await self._database.read(records.used_secrets) if wanted else set()
        return [name for name in wanted if f"{REFERENCE}{name}" not in used]

    async def sweep(self, ours: set[str]) -> None:
        """Remove what nobody needs but `ours`, which deployments have."""
        now = self._clock.now()
        old = await self._database.read(records.secrets_before, OF_JOBS, now - KEPT_S)
        left = await self._database.read(records.secrets_before, PREFIX, now)
        old += [name for name in left if not name.startswith(OF_JOBS)]
        if gone := await self.unused(set(old) - ours):
            await self._vault.change({}, remove=gone)


def tokens_of(deployment: LlmDeployment) -> set[str]:
    """The names of the secrets that are a deployment's own."""
    told = [each.hf_token for each in (deployment.settings, deployment.serving) if each is not None]
    own = f"{REFERENCE}{PREFIX}"
    return {each.removeprefix(REFERENCE) for each in told if each is not None and each.startswith(own)}


def is_reference(token: str) -> bool:
    return token.startswith(KINDS)


def _name_for_jobs(project: str, token: str) -> str:
    digest = hashlib.sha256(b"batchmill hub token\0" + project.encode() + b"\0" + token.encode()).hexdigest()
    return f"{OF_JOBS}{digest[:DIGEST_CHARS]}{END}"


def _check(token: str) -> str:
    """A token as it is. Raises: InvalidInput, without repeating it."""
    if is_reference(token):
        raise InvalidInput(
            "hf_token is the token itself: what refers to another secret is for whoever runs the machine",
            code="invalid_secret",
        )
    if flaw := flaw_of(token):
        raise InvalidInput(f"hf_token cannot be used: {flaw}", code="invalid_secret")
    return token

"""A base model and settings become the model whose engine runs like that. Pure, but for what the base model is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.secrets import KINDS, flaw_of
from batchmill.ports import Clock
from batchmill.services.llms import records
from batchmill.services.llms.arguments import checked
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.secrets.vault import Vault
from batchmill.store.database import Database
from batchmill.types import LlmSettings, ModelSpec, Scaling
from batchmill.types.machines import LEAST_AND_MOST

PREFIX, OF_JOBS, END = "llm/", "llm/token-", "/hf_token"
VARIABLE = "HF_TOKEN"  # where an engine looks for it
REFERENCE = "secret:"
KEPT_S = 7 * 86_400.0  # a job that has ended may be tried again for so long
TOKEN_DIGEST_CHARS = 32


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
    tokens = [each.hf_token for each in (deployment.settings, deployment.serving) if each is not None]
    own = f"{REFERENCE}{PREFIX}"
    return {each.removeprefix(REFERENCE) for each in tokens if each is not None and each.startswith(own)}


def is_reference(token: str) -> bool:
    return token.startswith(KINDS)


def _name_for_jobs(project: str, token: str) -> str:
    digest = hashlib.sha256(b"batchmill hub token\0" + project.encode() + b"\0" + token.encode()).hexdigest()
    return f"{OF_JOBS}{digest[:TOKEN_DIGEST_CHARS]}{END}"


def _check(token: str) -> str:
    """A token as it is. Raises: InvalidInput, without repeating it."""
    if is_reference(token):
        raise InvalidInput(
            "hf_token is the token itself: only the operator of the machine can refer to another secret",
            code="invalid_secret",
        )
    if flaw := flaw_of(token):
        raise InvalidInput(f"hf_token cannot be used: {flaw}", code="invalid_secret")
    return token


MEMORY_BYTES_MAX, GPUS_MAX = 2**50, 1_024
PRELOADED_MAX = 1_000
DIGEST_CHARS = 8
MARK = "~"  # no name that anybody chooses has it


def read(settings: LlmSettings, *, gpus_max: int | None) -> LlmSettings:
    """The settings with their engine arguments in one form. Raises: InvalidInput, naming what cannot be."""
    _check_scaling(settings.scaling)
    needs = settings.needs
    for name, value, most in (("memory_bytes", needs.memory_bytes, MEMORY_BYTES_MAX), ("gpus", needs.gpus, GPUS_MAX)):
        if not 0 <= value <= most:
            raise InvalidInput(f"{name} must be 0 to {most:,}, not {value}", code="invalid_setting")
    if len(settings.preloaded_adapters) > PRELOADED_MAX:
        raise InvalidInput(
            f"preloaded_adapters names {len(settings.preloaded_adapters)} adapters, {PRELOADED_MAX} at most",
            code="invalid_setting",
        )
    if settings.preloaded_adapters and not settings.takes_adapters:
        raise InvalidInput(
            "preloaded_adapters cannot be loaded where adapters are disabled: leave one of the two out",
            code="invalid_setting",
        )
    return replace(settings, engine_args=checked(settings.engine_args, gpus_max=gpus_max))


def _check_scaling(scaling: Scaling) -> None:
    for name, (low, high) in LEAST_AND_MOST.items():
        value = getattr(scaling, name, None)  # GPUs are not among them
        if value is not None and not low <= value <= high:
            raise InvalidInput(f"{name} must be {low:,} to {high:,}, not {value}", code="invalid_setting")
    if scaling.replicas_min > scaling.replicas_max:
        raise InvalidInput(
            f"replicas_min = {scaling.replicas_min} is more than replicas_max = {scaling.replicas_max}",
            code="invalid_setting",
        )


def model_of(base: ModelSpec, settings: LlmSettings, *, name: str | None = None) -> ModelSpec:
    """The model that the settings make of a base. With nothing said beside it, that is the base itself.

    Args: name, what it is called; None: as the base, with a digest of the settings where they make another of it.
    """
    made = replace(
        base,
        engine_args=_engine_args(base, settings),
        scaling=base.scaling if settings.scaling == Scaling() else settings.scaling,
        needs=replace(
            base.needs,
            memory_bytes=settings.needs.memory_bytes or base.needs.memory_bytes,
            gpus=settings.needs.gpus or base.needs.gpus,
        ),
        secrets=base.secrets | ({VARIABLE: settings.hf_token} if settings.hf_token is not None else {}),
    )
    if not settings.takes_adapters:
        made = replace(made, adapters={}, adapter_names={}, bad_adapters={}, adapter_patterns=[], adapter_rank=0)
    if made == base and name is None:
        return base
    return replace(made, name=name or f"{base.name}{MARK}{digest_of(settings)}", alias=base.name)


def _engine_args(base: ModelSpec, settings: LlmSettings) -> dict[str, str | int | float | bool | None]:
    """The base's own where the settings say the same in other words, so that its engine serves both."""
    ours = {_flag(flag) for flag in settings.engine_args}
    made = {flag: value for flag, value in base.engine_args.items() if _flag(flag) not in ours} | settings.engine_args
    return base.engine_args if _in_one_form(made) == _in_one_form(base.engine_args) else made


def _in_one_form(args: Mapping[str, str | int | float | bool | None]) -> dict[str, str]:
    """As a command line says them: a flag without a value is true."""
    return {_flag(flag): "true" if value is None else str(value).lower() for flag, value in args.items()}


def digest_of(settings: LlmSettings) -> str:
    """Of what makes an engine another one."""
    compared = replace(settings, preloaded_adapters=[])
    return hashlib.sha256(msgspec.json.encode(compared, order="deterministic")).hexdigest()[:DIGEST_CHARS]


def is_same_engine(mine: LlmSettings, other: LlmSettings) -> bool:
    """Rows of one may run on the engine of the other: however many replicas there are, and for how long."""
    blank = {"scaling": Scaling(), "preloaded_adapters": [], "needs": other.needs}
    return replace(mine, **blank) == replace(other, **blank)


def _flag(name: str) -> str:
    return name.lstrip("-").replace("_", "-")

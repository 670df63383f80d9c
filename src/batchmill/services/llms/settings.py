"""Makes the model of a deployment from a base model and its settings, and stores tokens for model hubs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.models.secrets import KINDS, LLM_TOKENS, find_secret_flaw
from batchmill.ports.clock import Clock
from batchmill.services.llms import records
from batchmill.services.llms.arguments import checked
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.secrets.vault import Vault
from batchmill.store.sql.database import Database
from batchmill.types import LlmSettings, ModelSpec, Scaling
from batchmill.types.machines import RANGES

PREFIX, OF_JOBS, END = LLM_TOKENS, f"{LLM_TOKENS}token-", "/hf_token"
VARIABLE = "HF_TOKEN"  # the environment variable that engines read
REFERENCE = "secret:"
KEPT_S = 7 * 86_400.0  # tokens stay so long, because an ended job can be retried
TOKEN_DIGEST_CHARS = 32


class HubTokens:
    def __init__(self, database: Database, vault: Vault, clock: Clock) -> None:
        self._database, self._vault, self._clock = database, vault, clock

    async def keep(self, project: str, settings: LlmSettings) -> LlmSettings:
        """Store a job's token. Returns the settings with a reference instead of it. Raises: InvalidInput."""
        if settings.hf_token is None:
            return settings
        name = _name_for_jobs(project, _check_token(settings.hf_token))
        await self._vault.change({name: settings.hf_token}, project=project)
        return replace(settings, hf_token=f"{REFERENCE}{name}")

    def split(
        self, deployment_id: str, settings: LlmSettings, *, is_trusted: bool
    ) -> tuple[LlmSettings, dict[str, str]]:
        """Return the settings of a deployment to store, and the token for the vault. Raises: InvalidInput."""
        token = settings.hf_token
        if token is None or (is_trusted and is_reference(token)):
            return settings, {}
        name = f"{PREFIX}{deployment_id}{END}"
        return replace(settings, hf_token=f"{REFERENCE}{name}"), {name: _check_token(token)}

    async def sweep(self, in_use: set[str]) -> None:
        """Remove unused tokens, except those of deployments (`in_use`)."""
        now = self._clock.now()
        old = await self._database.read(records.secrets_before, OF_JOBS, now - KEPT_S)
        others = await self._database.read(records.secrets_before, PREFIX, now)
        old += [name for name in others if not name.startswith(OF_JOBS)]
        if unused := sorted(set(old) - in_use):
            await self._vault.change({}, remove=unused, unless=records.used_secrets)


def tokens_of(deployment: LlmDeployment) -> set[str]:
    """Return the names of the secrets that belong to a deployment."""
    tokens = [each.hf_token for each in (deployment.settings, deployment.serving) if each is not None]
    prefix = f"{REFERENCE}{PREFIX}"
    return {each.removeprefix(REFERENCE) for each in tokens if each is not None and each.startswith(prefix)}


def is_reference(token: str) -> bool:
    return token.startswith(KINDS)


def _name_for_jobs(project: str, token: str) -> str:
    digest = hashlib.sha256(b"batchmill hub token\0" + project.encode() + b"\0" + token.encode()).hexdigest()
    return f"{OF_JOBS}{digest[:TOKEN_DIGEST_CHARS]}{END}"


def _check_token(token: str) -> str:
    """Return the token. Raises: InvalidInput, with a message that does not contain it."""
    if is_reference(token):
        raise InvalidInput(
            "hf_token must be the token itself: only the operator of the machine can refer to another secret",
            code="invalid_secret",
        )
    if flaw := find_secret_flaw(token):
        raise InvalidInput(f"hf_token cannot be used: {flaw}", code="invalid_secret")
    return token


MEMORY_BYTES_MAX, GPUS_MAX = 2**50, 1_024
PRELOADED_MAX = 1_000
DIGEST_CHARS = 8
MARK = "~"  # users cannot choose a name with it


def read(settings: LlmSettings, *, gpus_max: int | None) -> LlmSettings:
    """Return the settings with normalized engine arguments. Raises: InvalidInput with the invalid setting."""
    _check_scaling(settings.scaling)
    needs = settings.needs
    for name, value, maximum in (
        ("memory_bytes", needs.memory_bytes, MEMORY_BYTES_MAX),
        ("gpus", needs.gpus, GPUS_MAX),
    ):
        if not 0 <= value <= maximum:
            raise InvalidInput(f"{name} must be 0 to {maximum:,}, not {value}", code="invalid_setting")
    if len(settings.preloaded_adapters) > PRELOADED_MAX:
        raise InvalidInput(
            f"preloaded_adapters lists {len(settings.preloaded_adapters)} adapters, {PRELOADED_MAX} at most",
            code="invalid_setting",
        )
    if settings.preloaded_adapters and not settings.takes_adapters:
        raise InvalidInput(
            "preloaded_adapters cannot be loaded if adapters are disabled: leave one of the two out",
            code="invalid_setting",
        )
    return replace(settings, engine_args=checked(settings.engine_args, gpus_max=gpus_max))


def _check_scaling(scaling: Scaling) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(scaling, name, None)  # scaling has no GPUs
        if value is not None and not low <= value <= high:
            raise InvalidInput(f"{name} must be {low:,} to {high:,}, not {value}", code="invalid_setting")
    if scaling.replicas_min > scaling.replicas_max:
        raise InvalidInput(
            f"replicas_min = {scaling.replicas_min} is more than replicas_max = {scaling.replicas_max}",
            code="invalid_setting",
        )


def model_of(base: ModelSpec, settings: LlmSettings, *, name: str | None = None) -> ModelSpec:
    """Return the model that the settings make of a base. Without a name and with default settings, it is the base.

    Args: `name`: its name; None: the name of the base, with a digest of the settings if they change it.
    """
    model = replace(
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
        model = replace(model, adapters={}, adapter_names={}, bad_adapters={}, adapter_patterns=[], adapter_rank=0)
    if model == base and name is None:
        return base
    return replace(model, name=name or f"{base.name}{MARK}{digest_of(settings)}", alias=base.name)


def _engine_args(base: ModelSpec, settings: LlmSettings) -> dict[str, str | int | float | bool | None]:
    """Return the merged arguments; the base's own if they are equivalent, so that one engine serves both."""
    set_flags = {_flag(flag) for flag in settings.engine_args}
    merged = {
        flag: value for flag, value in base.engine_args.items() if _flag(flag) not in set_flags
    } | settings.engine_args
    return base.engine_args if _normalized(merged) == _normalized(base.engine_args) else merged


def _normalized(args: Mapping[str, str | int | float | bool | None]) -> dict[str, str]:
    """Return arguments as on a command line, where a flag without a value is true."""
    return {_flag(flag): "true" if value is None else str(value).lower() for flag, value in args.items()}


def digest_of(settings: LlmSettings) -> str:
    """Return a digest of the settings that need a different engine."""
    compared = replace(settings, preloaded_adapters=[])
    return hashlib.sha256(msgspec.json.encode(compared, order="deterministic")).hexdigest()[:DIGEST_CHARS]


def is_same_engine(mine: LlmSettings, other: LlmSettings) -> bool:
    """Tell whether rows of one can run on the engine of the other, with any scaling."""
    blank = {"scaling": Scaling(), "preloaded_adapters": [], "needs": other.needs}
    return replace(mine, **blank) == replace(other, **blank)


def _flag(name: str) -> str:
    return name.lstrip("-").replace("_", "-")

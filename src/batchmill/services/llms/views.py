"""Deployments of language models as batchmill's own API and command line show them. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict, replace

from batchmill.services.directory.configured import MEDIA_FLAG
from batchmill.services.llms.records import LlmDeployment
from batchmill.services.llms.service import LlmService
from batchmill.types import Caller, EngineView, LlmSettings, Needs, Scaling
from batchmill.wire.native_models import LlmChange, LlmInfo, NewLlm

SCALING = ("replicas_min", "replicas_max", "cooldown_s", "scale_up_requests")
NEEDS = ("memory_bytes", "gpus")
SETTINGS = ("base_model", "engine_args", "hf_token", "takes_adapters", "preloaded_adapters")


def settings_of(request: NewLlm) -> LlmSettings:
    fields = asdict(request)
    return LlmSettings(
        **{name: fields[name] for name in SETTINGS}, scaling=_scaling(Scaling(), fields), needs=_needs(Needs(), fields)
    )


def changed_settings(settings: LlmSettings, request: LlmChange) -> LlmSettings | None:
    """Return the settings with the given changes; None if there are none."""
    fields = {name: value for name, value in asdict(request).items() if value is not UNSET and name != "description"}
    if not fields:
        return None
    return replace(
        settings,
        **{name: fields[name] for name in SETTINGS if name in fields},
        scaling=_scaling(settings.scaling, fields),
        needs=_needs(settings.needs, fields),
    )


def _scaling(before: Scaling, fields: dict[str, Any]) -> Scaling:
    """Apply changes of the scaling. A replicas_min above an omitted replicas_max raises it too."""
    default = Scaling()
    changes = {name: fields[name] for name in SCALING if name in fields}
    scaling = replace(
        before, **{name: getattr(default, name) if changes[name] is None else changes[name] for name in changes}
    )
    if changes.get("replicas_max") is None and scaling.replicas_min > scaling.replicas_max:
        return replace(scaling, replicas_max=scaling.replicas_min)
    return scaling


def _needs(before: Needs, fields: dict[str, Any]) -> Needs:
    return replace(before, **{name: fields[name] or 0 for name in NEEDS if name in fields})


def info(deployment: LlmDeployment, view: EngineView) -> LlmInfo:
    settings, model = deployment.settings, deployment.model
    scaling = settings.scaling if model.scaling is None or deployment.is_updating else model.scaling
    return LlmInfo(
        id=deployment.id,
        name=deployment.name,
        base_model=settings.base_model,
        state=view.state,
        replicas=view.replicas,
        ready=view.ready,
        wanted=view.wanted,
        message=view.message,
        engine_args={name: value for name, value in settings.engine_args.items() if name != MEDIA_FLAG},
        has_hf_token=settings.hf_token is not None,
        **{name: getattr(scaling, name) for name in SCALING},
        memory_bytes=model.needs.memory_bytes,
        gpus=model.needs.gpus,
        takes_adapters=settings.takes_adapters,
        preloaded_adapters=settings.preloaded_adapters,
        adapters=[*model.adapters, *model.adapter_names],
        price=model.price,
        description=deployment.description,
        is_configured=deployment.is_configured,
        is_stopped=deployment.is_stopped,
        is_updating=deployment.is_updating,
        created=deployment.created,
        changed=deployment.changed,
    )


async def change(
    llms: LlmService, caller: Caller, name: str, request: LlmChange, *, is_trusted: bool = False
) -> LlmDeployment:
    """Change the fields that `request` sets. Omitted fields are unchanged."""
    settings = changed_settings(llms.get(caller, name).settings, request)
    description = request.description
    return await llms.update(
        caller, name, settings, description=UNSET if description is UNSET else description, is_trusted=is_trusted
    )

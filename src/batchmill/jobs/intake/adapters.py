"""Adapters of a job: those that rows name are fetched and checked before any row runs.

An unusable adapter stays in the job spec with an error: only its rows fail, with that error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.children.offload import Offload
from batchmill.errors import InvalidInput
from batchmill.jobs.ledger.plan import Plan, Progress
from batchmill.models.adapters import reading
from batchmill.ports.jobs import Adapters, FetchedAdapter
from batchmill.types import ModelSpec
from batchmill.wire.job_spec import JobSpec

CHECK = "batchmill.jobs.intake.adapters:check_offloaded"
READY = "ready"
TOKEN = "HF_TOKEN"  # the variable with the token for a model hub
SHOWN_MAX = 3  # adapters that are named in the reason to wait

ByModel = Mapping[int, Sequence[str]]  # number of a model -> names


class NoAdapters:
    """An `AdapterSource` without adapters."""

    async def ensure(
        self, project: str, base: str, hub_ids: Sequence[str], *, token: str | None = None
    ) -> Mapping[str, FetchedAdapter]:
        raise InvalidInput(
            f"rows name {hub_ids[0]!r}, and adapters cannot be fetched here: register it, or omit adapter_patterns",
            code="no_adapters",
        )


class AdapterCheck(Struct, frozen=True):
    """Adapters to check before rows run."""

    models: list[ModelSpec]
    names: dict[int, list[str]]  # own names


def check_offloaded(order: bytes, progress: Progress) -> bytes:
    """Offloaded: AdapterCheck in, {number of the model: {own name: why it cannot be used}} out, both as JSON."""
    request = msgspec.json.decode(order, type=AdapterCheck)
    total, done = sum(map(len, request.names.values())), 0
    bad: dict[int, dict[str, str]] = {}
    for number, names in request.names.items():
        model = request.models[number]
        for name in names:
            if why := find_adapter_flaw(model, model.adapters[name]):
                bad.setdefault(number, {})[name] = why
            done += 1
            progress(done / total)
    return msgspec.json.encode(bad)


def find_adapter_flaw(model: ModelSpec, folder: str) -> str:
    """Why the adapter in a folder cannot be used with a model; empty: it can."""
    try:
        facts = reading.read_adapter(Path(folder))
    except InvalidInput as error:
        return error.message
    rank_max = reading.configured_rank(model.engine_args) or model.adapter_rank
    return reading.find_mismatch(facts, base_source=model.source, rank_max=rank_max)


def used_by(models: Sequence[ModelSpec], plan: Plan) -> dict[int, list[str]]:
    """The adapters, by their own names, that rows of a plan use and that an engine of ours must load."""
    adapters: dict[int, list[str]] = {}
    for target in plan.targets:
        if target.adapter is not None and (target.rows or target.folded) and models[target.model].traits.loads_adapters:
            adapters.setdefault(target.model, []).append(target.adapter)
    return adapters


def drop_unused(spec: JobSpec, used: ByModel) -> JobSpec:
    """The spec without unused adapters: a job may be offered thousands, and its spec is sent often.

    They stay if the engine starts with its adapters: jobs with the same adapters share it.
    """
    models = [
        without_others(model, used.get(number, ())) if model.traits.loads_adapters and model.adapter_rank else model
        for number, model in enumerate(spec.models)
    ]
    return replace(spec, models=models)


def without_others(model: ModelSpec, used: Sequence[str]) -> ModelSpec:
    used_names, own_names = frozenset(used), model.adapter_names
    allowed = model.allowed
    if allowed is not None:
        allowed = [
            name for name in allowed if (own := own_names.get(name, name)) not in model.adapters or own in used_names
        ]
    return replace(
        model, adapters={name: folder for name, folder in model.adapters.items() if name in used_names},
        adapter_names={name: own for name, own in own_names.items() if own in used_names},
        bad_adapters={name: why for name, why in model.bad_adapters.items() if name in used_names}, allowed=allowed,
    )  # fmt: skip


def keep_adapters(spec: JobSpec, earlier: JobSpec) -> JobSpec:
    """The new spec of a job that is submitted again: its rows keep the adapters they had."""
    before = {model.name: model for model in earlier.models}
    models = [_keep_adapters(model, before.get(model.name)) for model in spec.models]
    return replace(spec, models=models)


def _keep_adapters(model: ModelSpec, before: ModelSpec | None) -> ModelSpec:
    if before is None or before.engine != model.engine:
        return model
    return replace(
        model, adapters=before.adapters, adapter_names=before.adapter_names, bad_adapters=before.bad_adapters,
        adapter_rank=max(model.adapter_rank, before.adapter_rank), allowed=before.allowed,
    )  # fmt: skip


def with_fetched(model: ModelSpec, fetched: Mapping[str, FetchedAdapter]) -> ModelSpec:
    """A model with fetched adapters: id -> result. Its engine gets a rank limit that fits them."""
    names = {hub_id: adapter.own_name for hub_id, adapter in fetched.items()}
    folders = {adapter.own_name: _folder_of(hub_id, adapter) for hub_id, adapter in fetched.items()}
    bad = {adapter.own_name: _why(adapter) for adapter in fetched.values() if adapter.state != READY}
    allowed = None if model.allowed is None else list(dict.fromkeys([*model.allowed, *names, *folders]))
    return replace(
        model, adapters=model.adapters | folders, adapter_names=model.adapter_names | names,
        bad_adapters=model.bad_adapters | bad, adapter_rank=_rank_with(model, fetched), allowed=allowed,
    )  # fmt: skip


def _rank_with(model: ModelSpec, fetched: Mapping[str, FetchedAdapter]) -> int:
    """The rank limit that the engine needs with these adapters."""
    ranks = [adapter.rank for adapter in fetched.values() if adapter.state == READY]
    if not ranks or reading.configured_rank(model.engine_args) is not None:
        return model.adapter_rank
    return reading.engine_rank_for([model.adapter_rank, reading.RANK_DEFAULT, *ranks])


def _folder_of(hub_id: str, adapter: FetchedAdapter) -> str:
    """The folder of an adapter; the id of one that could not be fetched, so that a retry tries again."""
    return adapter.folder if adapter.state == READY else hub_id


def _why(adapter: FetchedAdapter) -> str:
    return adapter.message or f"it is {adapter.state}"


def with_used(spec: JobSpec, plan: Plan) -> JobSpec:
    """The models that the rows of a server's job use, out of all that its caller may use."""
    if spec.origin is None:
        return spec
    used = [target.adapter or spec.models[target.model].name for target in plan.targets if target.rows or target.folded]
    return replace(spec, used=used)


class AdapterWork:
    """Fetches and checks adapters for one job. `waiting_for`: what it waits for; empty: nothing."""

    def __init__(self, source: Adapters, offload: Offload) -> None:
        self._source, self._offload = source, offload
        self.waiting_for = ""

    async def fetch(self, spec: JobSpec, missing: ByModel) -> JobSpec:
        """The spec with the adapters that rows name by their ids at a model hub."""
        self.waiting_for = _waiting([name for names in missing.values() for name in names])
        try:
            models = list(spec.models)
            for number, names in missing.items():
                fetched = await self._ensure(spec.project, models[number], names)
                models[number] = await asyncio.to_thread(with_fetched, models[number], fetched)
            return replace(spec, models=models)
        finally:
            self.waiting_for = ""

    async def _ensure(self, project: str, model: ModelSpec, hub_ids: Sequence[str]) -> Mapping[str, FetchedAdapter]:
        """Fetch adapters with the token of the model.

        They are registered for the base of an alias, so that other aliases of that base have them too.
        """
        return await self._source.ensure(project, model.alias or model.name, hub_ids, token=model.secrets.get(TOKEN))

    async def check(self, spec: JobSpec, used: ByModel) -> JobSpec:
        """The spec with an error for every adapter that is used and cannot be loaded."""
        spec = await self._fetch_hub_adapters(spec, _without_error(spec, used))
        order = AdapterCheck(spec.models, _without_error(spec, used))
        if not order.names:
            return spec
        result = await self._offload(CHECK, msgspec.json.encode(order), lambda _: None)
        return _with_bad(spec, msgspec.json.decode(result, type=dict[int, dict[str, str]]))

    async def check_again(self, spec: JobSpec, called: ByModel) -> JobSpec:
        """As `check`, for adapters that failed before, which may work now, and for those that a retry calls."""
        used = {number: list(model.bad_adapters) for number, model in enumerate(spec.models) if model.bad_adapters}
        used |= {number: list(dict.fromkeys([*used.get(number, ()), *names])) for number, names in called.items()}
        models = [replace(model, bad_adapters={}) if model.bad_adapters else model for model in spec.models]
        return await self.check(replace(spec, models=models), used) if used else spec

    async def _fetch_hub_adapters(self, spec: JobSpec, used: ByModel) -> JobSpec:
        """Fetch adapters from a model hub, and map the names that rows use to them."""
        hubs = {
            number: {name: folder for name in names if not os.path.isabs(folder := spec.models[number].adapters[name])}
            for number, names in used.items()
        }
        self.waiting_for = _waiting([hub_id for hub_ids in hubs.values() for hub_id in hub_ids.values()])
        try:
            models = list(spec.models)
            for number, hub_ids in hubs.items():
                if hub_ids:
                    ids = list(dict.fromkeys(hub_ids.values()))
                    fetched = await self._ensure(spec.project, models[number], ids)
                    models[number] = _with_folders(
                        models[number], {name: fetched[hub_id] for name, hub_id in hub_ids.items()}
                    )
            return replace(spec, models=models)
        finally:
            self.waiting_for = ""


def _without_error(spec: JobSpec, used: ByModel) -> dict[int, list[str]]:
    """The adapters of `used` without an error."""
    bad = {number: spec.models[number].bad_adapters for number in used}
    sound = {number: [name for name in names if name not in bad[number]] for number, names in used.items()}
    return {number: names for number, names in sound.items() if names}


def _with_folders(model: ModelSpec, fetched: Mapping[str, FetchedAdapter]) -> ModelSpec:
    """A model whose adapters are at the folders where they were fetched to."""
    bad = {name: _why(adapter) for name, adapter in fetched.items() if adapter.state != READY}
    folders = {name: adapter.folder for name, adapter in fetched.items() if name not in bad}
    return replace(
        model, adapters=model.adapters | folders, bad_adapters=model.bad_adapters | bad,
        adapter_rank=_rank_with(model, fetched),
    )  # fmt: skip


def _with_bad(spec: JobSpec, bad: Mapping[int, Mapping[str, str]]) -> JobSpec:
    if not bad:
        return spec
    models = list(spec.models)
    for number, why in bad.items():
        models[number] = replace(models[number], bad_adapters=models[number].bad_adapters | dict(why))
    return replace(spec, models=models)


def _waiting(names: Iterable[str]) -> str:
    shown = list(dict.fromkeys(names))
    if not shown:
        return ""
    more = f" and {len(shown) - SHOWN_MAX:,} more" if len(shown) > SHOWN_MAX else ""
    what = "1 adapter" if len(shown) == 1 else f"{len(shown):,} adapters"
    return f"fetching {what}: {', '.join(shown[:SHOWN_MAX])}{more}"

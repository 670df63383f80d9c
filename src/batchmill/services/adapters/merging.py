"""A base model with the adapters that a caller may use with it: all of them for a job, one for a live request. Pure.

Whose adapters they are does not matter to its engine: it has room for the ranks of every project's, so that one engine
serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from batchmill.services.adapters.records import AdapterRecord
from batchmill.types import ModelSpec

May = Callable[[str], bool]  # the caller may use this name


def with_room(model: ModelSpec, rank: int) -> ModelSpec:
    """The model, its engine with room for adapters of this rank."""
    return model if rank <= model.adapter_rank else replace(model, adapter_rank=rank)


def names_of(records: Iterable[AdapterRecord], may: May) -> dict[str, AdapterRecord]:
    """What a caller may call these versions: "NAME" is the newest, and allows every "NAME/VERSION"."""
    found: dict[str, AdapterRecord] = {}
    for record in records:  # the oldest of a name first
        if may(record.name):
            found[record.name] = record
        if may(record.name) or may(record.own_name):
            found[record.own_name] = record
    return found


def with_all(model: ModelSpec, records: Iterable[AdapterRecord], may: May) -> ModelSpec:
    """The model of a job, whose rows may name these adapters too. Names that it has already stay what they are."""
    known = model.targets()
    named = {name: record for name, record in names_of(records, may).items() if name not in known}
    if not named:
        return model
    places = {record.own_name: record.folder for record in named.values()}
    aliases = {name: record.own_name for name, record in named.items() if name != record.own_name}
    allowed = None if model.allowed is None else [*model.allowed, *named]
    return replace(
        model, adapters=model.adapters | places, adapter_names=model.adapter_names | aliases, allowed=allowed
    )


def with_one(model: ModelSpec, record: AdapterRecord) -> ModelSpec:
    """The model of a live request to this adapter."""
    return replace(model, adapters={record.own_name: record.folder}, adapter_names={})


def each_once(models: Sequence[ModelSpec], meant: Callable[[str], str | None]) -> list[ModelSpec]:
    """The models of one job, of which each name stands for one: that of a model before that of an adapter, and of
    adapters of several bases the version that the name means alone.

    Args: meant: the own name of the version that a name means; None: no registered adapter is called so.
    """
    claims: dict[str, list[int]] = {}
    for number, model in enumerate(models):
        for name in model.allowed or ():
            claims.setdefault(name, []).append(number)
    lost: dict[int, set[str]] = {}
    for name, numbers in claims.items():
        if len(numbers) > 1:
            keeper = min(numbers, key=lambda number: _standing(models[number], name, meant))
            for number in numbers:
                if number != keeper:
                    lost.setdefault(number, set()).add(name)
    return [_without(model, lost[number]) if number in lost else model for number, model in enumerate(models)]


def _standing(model: ModelSpec, name: str, meant: Callable[[str], str | None]) -> int:
    own = model.adapter_names.get(name, name)
    if own not in model.adapters:
        return 0
    return 1 if own == meant(name) else 2


def _without(model: ModelSpec, names: set[str]) -> ModelSpec:
    return replace(model, allowed=[name for name in model.allowed or () if name not in names])

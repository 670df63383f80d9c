"""Model groups: a group has the versions of one model.

OpenSearch's access control does not exist here: a project sees all of its own groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from batchmill.errors import Conflict, InvalidInput, UnknownName
from batchmill.ports.clock import Clock
from batchmill.services.remote import model_records as records
from batchmill.services.remote.changes import Changes, new_id
from batchmill.services.remote.model_records import ModelGroup
from batchmill.store.sql.database import Database
from batchmill.types import Caller, ProjectQuotas

__all__ = ["ModelGroup", "ModelGroups"]

NAME_CHARS_MAX = 256
TEXT_CHARS_MAX = 10_000
SHOWN_CHARS = 80
ACCESS_MODES = ("public", "private")  # without roles, both mean the group's project


class ModelGroups:
    """All methods raise UnknownName (`group_not_found`) for a group that is unknown or of another project."""

    def __init__(
        self, database: Database, clock: Clock, changes: Changes, quotas: ProjectQuotas = ProjectQuotas()
    ) -> None:
        self._database, self._clock, self._changes, self._quotas = database, clock, changes, quotas
        self._groups: dict[str, ModelGroup] = {}

    async def load(self) -> None:
        """Read all groups."""
        self._groups = {each.id: each for each in await self._database.read(records.read_groups)}

    def get(self, caller: Caller, group_id: str) -> ModelGroup:
        group = self._groups.get(group_id)
        if group is None or group.project != caller.project:
            raise UnknownName(f"Failed to find model group with ID: {group_id[:SHOWN_CHARS]}", code="group_not_found")
        return group

    def by_name(self, caller: Caller, name: str) -> ModelGroup | None:
        """The group of the caller's project with this name, or None."""
        return next((each for each in self.all(caller) if each.name == name), None)

    def all(self, caller: Caller) -> list[ModelGroup]:
        """The groups of the caller's project, the oldest first."""
        return [each for each in self._groups.values() if each.project == caller.project]

    async def register(self, caller: Caller, fields: Mapping[str, Any]) -> ModelGroup:
        """Create a group. Raises: InvalidInput for a name that is taken and for unsupported fields."""
        name, details = _name(fields), _details(fields, {})
        if name is None:
            raise InvalidInput("Model group name is null", code="missing_name")
        return await self._changes.make(self._register(caller, name, details))

    async def _register(self, caller: Caller, name: str, details: dict[str, Any]) -> ModelGroup:
        self._refuse_duplicate(caller, name)
        group = self.new(caller, name, details)
        await self._database.write(records.insert_group, group, self._quotas.of(caller.project).model_groups)
        self.put(group)
        return group

    def new(self, caller: Caller, name: str, details: Mapping[str, Any] | None = None) -> ModelGroup:
        """Make a group without storing it."""
        now = self._clock.now()
        return ModelGroup(new_id(), caller.project, name, 0, {"access": "public", **(details or {})}, 1, now, now)

    def put(self, group: ModelGroup) -> None:
        """Replace a group in memory after it was stored."""
        self._groups[group.id] = group

    async def update(self, caller: Caller, group_id: str, fields: Mapping[str, Any]) -> ModelGroup:
        """Change the given fields."""
        name, details = _name(fields), _details(fields, self.get(caller, group_id).details)
        return await self._changes.make(self._update(caller, group_id, name, details))

    async def _update(self, caller: Caller, group_id: str, name: str | None, details: dict[str, Any]) -> ModelGroup:
        old = self.get(caller, group_id)
        if name is not None and name != old.name:
            self._refuse_duplicate(caller, name)
        changed = {
            "details": details,
            "revision": old.revision + 1,
            "changed": max(self._clock.now(), old.changed),
        }
        group = replace(old, name=name or old.name, **changed)
        await self._database.write(records.update_group, group)
        self.put(group)
        return group

    async def delete(self, caller: Caller, group_id: str) -> ModelGroup:
        """Delete a group. Raises: Conflict while it has models."""
        group = self.get(caller, group_id)
        return await self._changes.make(self._delete(group))

    async def _delete(self, group: ModelGroup) -> ModelGroup:
        if not await self._database.write(records.delete_group, group.id):
            raise Conflict("Cannot delete the model group when it has associated model versions", code="group_in_use")
        self._groups.pop(group.id, None)
        return group

    def _refuse_duplicate(self, caller: Caller, name: str) -> None:
        if (existing := self.by_name(caller, name)) is not None:
            raise InvalidInput(
                f"The name you provided is already being used by a model group with ID: {existing.id}.",
                code="group_name_taken",
            )


def _name(fields: Mapping[str, Any]) -> str | None:
    name = fields.get("name")
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name.strip()) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidInput(f"a model group's name is 1 to {NAME_CHARS_MAX} printable characters", code="invalid_name")
    return name


def _details(fields: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The stored fields of a group besides its name. Raises: InvalidInput for unsupported fields."""
    mode = fields.get("access_mode", fields.get("model_access_mode"))
    if fields.get("backend_roles") or fields.get("add_all_backend_roles") is True:
        raise InvalidInput(
            "You cannot specify model access control parameters because the Security plugin or model access control "
            "is disabled on your cluster.",
            code="no_access_control",
        )
    if mode is not None and mode not in ACCESS_MODES:
        raise InvalidInput(
            f"access_mode must be one of {', '.join(ACCESS_MODES)}, not {str(mode)[:SHOWN_CHARS]!r}: a group belongs "
            "to its project, and there are no roles",
            code="no_access_control",
        )
    description = fields.get("description")
    if description is not None and (not isinstance(description, str) or len(description) > TEXT_CHARS_MAX):
        raise InvalidInput(f"a description is a text of at most {TEXT_CHARS_MAX:,} characters", code="invalid_text")
    values = {"access": mode, "description": description}
    return {**old, **{name: value for name, value in values.items() if value is not None}}

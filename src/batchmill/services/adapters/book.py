"""The adapters that there are, in memory, by what they are asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from batchmill.services.adapters.names import read_reference
from batchmill.services.adapters.records import READY, AdapterRecord


class AdapterBook:
    """`revision` rises with every change."""

    def __init__(self, records: Iterable[AdapterRecord]) -> None:
        self.revision = 0
        self._records: dict[str, AdapterRecord] = {}
        self._names: dict[str, dict[str, list[AdapterRecord]]] = {}  # project -> name -> its versions, the oldest first
        for record in records:
            self.put(record)

    def put(self, record: AdapterRecord) -> None:
        self._records[record.id] = record
        versions = self._names.setdefault(record.project, {}).setdefault(record.name, [])
        versions[:] = sorted(
            [each for each in versions if each.id != record.id] + [record], key=lambda each: each.version
        )
        self.revision += 1

    def drop(self, records: Iterable[AdapterRecord]) -> None:
        for record in records:
            self._records.pop(record.id, None)
            names = self._names.get(record.project, {})
            names[record.name] = [each for each in names.get(record.name, ()) if each.id != record.id]
            if not names[record.name]:
                del names[record.name]
        self.revision += 1

    def all(self) -> list[AdapterRecord]:
        return [record for project in sorted(self._names) for record in self.of(project)]

    def of(self, project: str) -> list[AdapterRecord]:
        """By name and number."""
        names = self._names.get(project, {})
        return [record for name in sorted(names) for record in names[name]]

    def get(self, record_id: str) -> AdapterRecord | None:
        return self._records.get(record_id)

    def find(self, project: str, name: str, version: int | None) -> AdapterRecord | None:
        """A version; without a number the newest that is ready, or else the newest."""
        versions = self._names.get(project, {}).get(name, [])
        if version is not None:
            return next((each for each in versions if each.version == version), None)
        ready = [each for each in versions if each.state == READY]
        return (ready or versions or [None])[-1]

    def find_ready(self, project: str, text: str) -> AdapterRecord | None:
        """The version that "NAME" or "NAME/VERSION" means now; None: there is none that is ready."""
        for name, version in ((text, None), read_reference(text)):
            found = self.find(project, name, version)
            if found is not None and found.state == READY:
                return found
        return None

    def newest(self, project: str, base: str, name: str) -> AdapterRecord | None:
        """The newest version for a base, whatever its state."""
        versions = self._names.get(project, {}).get(name, [])
        return next((each for each in reversed(versions) if each.base == base), None)

    def ready(self, project: str, base: str) -> list[AdapterRecord]:
        return [each for each in self.of(project) if each.base == base and each.state == READY]

    def rank_of(self, bases: Iterable[str]) -> int:
        """The highest rank of all projects' adapters for these models."""
        wanted = set(bases)
        return max(
            (each.rank for each in self._records.values() if each.base in wanted and each.state == READY), default=0
        )

"""Where all jobs of a data directory keep their files, and what their projects say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from batchmill.config.entries import ProjectEntry
from batchmill.ports.executors import NodeTasks
from batchmill.store.disk_room import DiskQuota
from batchmill.store.stored_files import LocalFiles, StoredFiles


class JobSpace(Struct, frozen=True, eq=False):
    """Where jobs keep their files."""

    data_dir: Path
    disk_quota: DiskQuota  # counts the bytes of projects
    stored: StoredFiles = LocalFiles()  # where the files are durable
    is_shared: bool = False  # workers on other machines read them
    tasks: NodeTasks | None = None  # pieces of work on these machines; None: they read no object store
    projects: Mapping[str, ProjectEntry] = {}  # whose rows take over results of earlier jobs

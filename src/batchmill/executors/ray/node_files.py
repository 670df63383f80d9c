"""NodeFiles: what a worker on a node has of the owner's data directory, which the node does not see.

The owner's messages name files of that directory, and where each is kept in the object store. They are brought to the
node's cache, and the worker gets the messages with the paths of this node.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from batchmill.errors import StorageFailed
from batchmill.executors.ray.frames import NodeOrder
from batchmill.executors.ray.node_cache import SEGMENTS, NodeCache, cache_folder
from batchmill.models import environments, worker_environment
from batchmill.models.environments import Environments
from batchmill.object_store.credentials import has_credentials
from batchmill.store.objects import StoreObjects
from batchmill.types import Isolation, Provision, SchemaVersion, SegmentPlace
from batchmill.wire.messages import AnswerLive, Open, Start, StoredFile
from batchmill.wire.rows.forms import OpenAIForm, TableForm

LIVE = "live"  # holds what live requests name,
LIVE_FILES_MAX = 256  # the last so many adapters
START = "start"


class NodeFiles:
    """Concurrency: any thread; what one holder holds is brought by one at a time."""

    def __init__(self, order: NodeOrder, worker: str) -> None:
        """Raises: ModelFailed if this node has no place for the cache; InvalidConfig."""
        storage = order.storage
        worker_environment.lend(storage.environ)
        if not has_credentials(os.environ):
            worker_environment.lend(storage.credentials)
        self._folder = cache_folder(order.cache, storage.url)
        self._cache = NodeCache(self._folder, StoreObjects(storage.url), order.cache_bytes)
        self._data_dir = order.data_dir
        self.home, self._fd = self._cache.enter(worker)
        self._isolation: Isolation | None = None  # of deployed code; set by `start`
        self._held: dict[str, dict[str, tuple[Path, int]]] = {}  # holder -> object -> its copy, and what keeps it

    def bring(self, holder: str, files: Sequence[StoredFile]) -> dict[str, str]:
        """Bring files, which stay until `release`. Returns: path in the data directory -> path here.

        Raises: StorageFailed, OSError.
        """
        held = self._held.setdefault(holder, {})
        for file in files:
            held[file.object] = held.pop(file.object, None) or self._cache.hold(file)  # what was named last comes last
        return {file.path: str(held[file.object][0]) for file in files}

    def has(self, holder: str, files: Sequence[StoredFile]) -> bool:
        held = self._held.get(holder, {})
        return all(file.object in held for file in files)

    def release(self, holder: str) -> None:
        """The holder needs its files no longer. Its job's segments are in the store."""
        for _, fd in list(self._held.pop(holder, {}).values()):
            os.close(fd)
        shutil.rmtree(self.home / SEGMENTS / holder, ignore_errors=True)

    def leave(self) -> None:
        """The worker has ended by itself: nothing of it is needed."""
        shutil.rmtree(self.home, ignore_errors=True)

    # -- messages with the paths of this node -------------------------------------------------------------------------

    async def start(self, start: Start, files: Sequence[StoredFile]) -> Start:
        """Raises: StorageFailed, OSError; ModelFailed if an environment cannot be built."""
        moved = await asyncio.to_thread(self.bring, START, files)
        provision = self.provision(start.provision)
        self._isolation = provision.isolation
        model = start.model
        model = replace(model, adapters=self._placed_all(model.adapters, moved))
        if model.function is not None and model.function.folder:
            model = replace(model, function=replace(model.function, folder=self._placed(model.function.folder, moved)))
            model = replace(model, python=await self._python(model.python, model.function.folder))
        return replace(start, home=str(self.home), model=model, provision=provision)

    def provision(self, provision: Provision) -> Provision:
        """With the sandbox of this node."""
        if provision.isolation is None:
            return provision
        return replace(provision, isolation=replace(provision.isolation, data_dir=str(self._folder.parent)))

    async def _python(self, python: str | None, folder: str) -> str | None:
        """The interpreter of deployed code in a folder here: its environment is built on this node unless it is there.

        Args: python: at the owner.
        """
        if python is None or not python.startswith(f"{self._data_dir}/"):
            return python
        interpreter, lock = environments.read_requested(Path(folder).parent)
        place = self._folder / environments.FOLDER
        fd = os.open(self._folder / f"{environments.FOLDER}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)  # of another worker that builds it
            built = Environments(place, self._isolation)
            return await built.python(interpreter, lock, self.home / "environment.log")
        finally:
            os.close(fd)

    async def with_class(self, message: Open) -> Open:
        """A message of `open` with the environment of its job's class. Raises: ModelFailed if it cannot be built."""
        schema = message.form.schema
        if schema is None or schema.version is None:
            return message
        python = await self._python(schema.version.python, schema.version.folder)
        return replace(message, form=_with_version(message.form, replace(schema.version, python=python)))

    def open(self, message: Open) -> Open:
        """Raises: StorageFailed, OSError."""
        moved = self.bring(message.job, message.files)
        adapters, form = message.adapters, message.form
        if form.schema is not None and (version := form.schema.version) is not None:
            form = _with_version(form, replace(version, folder=self._placed(version.folder, moved)))
        for path in message.inputs:
            self._placed(path, moved)
        return replace(
            message, form=form, dataset=self._placed(message.dataset, moved), files=[], inputs=[], moved=moved,
            segments=SegmentPlace(str(self.home / SEGMENTS / message.job)),
            adapters=replace(adapters, places=self._placed_all(adapters.places, moved)),
        )  # fmt: skip

    def live(self, message: AnswerLive) -> AnswerLive:
        """Raises: StorageFailed, OSError."""
        moved = self.bring(LIVE, message.files)
        held = self._held[LIVE]
        while message.files and len(held) > LIVE_FILES_MAX:  # the one that was named longest ago
            _, fd = held.pop(next(iter(held)))
            os.close(fd)
        request = message.request
        request = replace(request, adapter_place=self._placed(request.adapter_place, moved))
        return replace(message, request=request, files=[])

    def _placed(self, path: str, moved: Mapping[str, str]) -> str:
        """Where a path of the owner is here: it, or a folder above it, was brought. What is not below the data
        directory is the same on every node.

        Raises: StorageFailed.
        """
        for before, now in moved.items():
            if path == before or (path.startswith(f"{before}/") and ".." not in path.split("/")):
                return now + path.removeprefix(before)
        if path.startswith(f"{self._data_dir}/"):
            raise StorageFailed(f"{path} is not in the object store, and the nodes of the cluster do not see it")
        return path

    def _placed_all(self, places: Mapping[str, str], moved: Mapping[str, str]) -> dict[str, str]:
        return {name: self._placed(place, moved) for name, place in places.items()}


def _with_version(form: OpenAIForm | TableForm, version: SchemaVersion) -> OpenAIForm | TableForm:
    assert form.schema is not None, "it has a class"
    return replace(form, schema=replace(form.schema, version=version))


__all__ = ["NodeFiles"]

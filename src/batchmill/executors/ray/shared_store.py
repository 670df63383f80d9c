"""SharedStore: `[storage]`, for workers on nodes that do not see the data directory.

It says which objects hold what a message names of the directory, and brings what a worker has written to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.errors import StorageFailed
from batchmill.executors.ray import frames
from batchmill.executors.ray.frames import CollectOrder, LeftSegment, NodeOrder, NodeStore
from batchmill.object_store.credentials import on_nodes
from batchmill.store.segments.files import SegmentFolder
from batchmill.store.stored_files import StoredFiles
from batchmill.types import ModelSpec
from batchmill.types.connectors import Storage
from batchmill.wire.messages import AnswerLive, Open, Start, StoredFile

SEGMENT = re.compile(r"-\d{4,}\.seg")  # behind the worker's name


class SharedStore(Struct, frozen=True, eq=False):
    """
    Args:
        cache, cache_bytes: the folder of each node for copies, and their bytes.
    """

    stored: StoredFiles
    storage: Storage
    cache: str
    cache_bytes: int
    data_dir: Path

    @property
    def url(self) -> str:
        return self.storage.url

    def on_nodes(self, *, with_credentials: bool) -> NodeStore:
        storage = on_nodes(self.storage, with_credentials=with_credentials)
        return NodeStore(storage, self.cache, self.cache_bytes, str(self.data_dir))

    def node_order(self, model: ModelSpec, storage: Storage | None) -> NodeOrder:
        """What a worker of this model needs of its node."""
        assert storage is not None, "the workers of an owner with a store put their segments there"
        folder = "" if model.function is None else model.function.folder
        files = self._files_of(folder, *model.adapters.values())
        return NodeOrder(storage, self.cache, self.cache_bytes, str(self.data_dir), files)

    def with_files(self, message: Open | AnswerLive) -> Open | AnswerLive:
        """The message with the objects of the files that it names. The node refuses one that is not in the store."""
        if isinstance(message, Open):
            schema = message.form.schema
            code = [] if schema is None or schema.version is None else [schema.version.folder]
            files = self._files_of(message.dataset, *message.inputs, *message.adapters.places.values(), *code)
            return replace(message, files=files)
        place = message.request.adapter_place
        return replace(message, files=self._files_of(place)) if place else message

    def files_of_work(self, paths: Sequence[str]) -> list[StoredFile]:
        """Where the files of a piece of work are kept. Raises: StorageFailed for one that is not in the store."""
        files = self._files_of(*paths)
        for path in paths:
            if not any(path == file.path or path.startswith(f"{file.path}/") for file in files):
                raise StorageFailed(f"{path} is not in the object store, so no node can read it")
        return files

    def _files_of(self, *paths: str) -> list[StoredFile]:
        """Where files of the data directory are kept; others are to be on every node."""
        own = [Path(path) for path in dict.fromkeys(paths) if path.startswith(f"{self.data_dir}/")]
        return self.stored.references(*own)

    async def settle(self, worker: str, folders: Mapping[str, Path]) -> None:
        """Bring the segments of a worker to the same bytes here and in the store, by job. Raises: StorageFailed."""
        for folder in folders.values():
            await self.stored.settle_segments(folder, worker)

    def collect_order(self, worker: str, folders: Mapping[str, Path]) -> CollectOrder:
        """Raises: OSError."""
        return CollectOrder(self.url, self.cache, worker, _segment_sizes(folders, worker))


def _segment_sizes(folders: Mapping[str, Path], worker: str) -> dict[str, dict[str, int]]:
    """The bytes of a worker's segments that are on this machine, by job and name. Raises: OSError."""
    sizes = {}
    for job, folder in folders.items():
        source = SegmentFolder(folder)
        try:
            sizes[job] = {name: source.size(name) for name in source.names(worker)}
        finally:
            source.close()
    return sizes


def keep_left(data: bytes, start: Start, folders: Mapping[str, Path]) -> bool:
    """Write the worker's blocks behind those that are here, the row that ran alone, and the end of its log.

    Returns whether there are blocks. What is in them is checked where it is counted. Raises: OSError, StorageFailed.
    """
    try:
        left = frames.lefts.decode(data)
    except msgspec.MsgspecError as error:
        raise StorageFailed(f"the node sent something else: {error}") from None
    home = Path(start.home)
    with open(home / f"{start.worker}.log", "ab") as log:
        log.write(left.log)
    if left.suspect is not None:
        (home / f"{start.worker}.suspect").write_bytes(left.suspect)
    for segment in left.segments:
        folder = folders.get(segment.job)
        if folder is None or not SEGMENT.fullmatch(segment.name.removeprefix(start.worker)):
            raise StorageFailed(f"the node sent a segment that is not this worker's: {segment.name[:100]!r}")
        _append(folder, segment)
    return bool(left.segments)


def _append(folder: Path, segment: LeftSegment) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder / segment.name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(fd).st_size != segment.offset:
            raise StorageFailed(f"the node sent the bytes of {segment.name} from {segment.offset:,} on")
        view, at = memoryview(segment.data), segment.offset
        while view:
            written = os.pwrite(fd, view, at)
            view, at = view[written:], at + written
        os.fsync(fd)
    finally:
        os.close(fd)


__all__ = ["SharedStore", "keep_left"]

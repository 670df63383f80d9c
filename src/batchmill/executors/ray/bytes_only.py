"""Makes this process read bytes alone from Ray: whatever else an actor returns or raises is refused unread.

Ray unpickles the results and errors of actors in their driver. A worker's node may be taken over by code that it runs,
and its owner's machine must not be with it. Ray has no setting for this, so one method of Ray is replaced; `install`
tries it out, and a version of Ray in which it has no effect is not used.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from ray._private.ray_constants import OBJECT_METADATA_TYPE_RAW
from ray._private.serialization import SerializationContext
from ray._raylet import MessagePackSerializer, split_buffer
from ray.core.generated.common_pb2 import ActorDiedErrorContext, ErrorType, RayErrorInfo
from ray.exceptions import RayError

LOST = frozenset({"NODE_DIED", "LOCAL_RAYLET_DIED", "OWNER_DIED", "ACTOR_UNAVAILABLE", "OBJECT_LOST"})
NODE_DIED = ActorDiedErrorContext.NODE_DIED
WHY_CHARS = 1000
RESULT_BYTES_MAX = 256 * 1024 * 1024  # of a result without a limit: more than any that batchmill's own code returns
_EXIT_CODE = re.compile(r"exits with an exit code (\d{1,3})\b")
GUESSES = " Some common causes include"  # begins Ray's own, after what it knows of a death
_limits: dict[bytes, int] = {}  # id of a result that a caller waits for -> its bytes at most


class ActorFailed(RayError):
    """A call of an actor failed.

    Args:
        kind: a name of Ray's ErrorType, or "NOT_BYTES" for a result that was refused.
        is_lost: its node went away.
        is_of_setup: its actor could not be made: its class was not imported, or raised.
        process: that of the actor, if it has died: the address of its node, and its process id.
    """

    def __init__(
        self, kind: str, why: str = "", *, is_lost: bool = False, is_of_setup: bool = False,
        process: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(f"{kind}: {why}" if why else kind)
        self.kind, self.is_lost, self.is_of_setup = kind, is_lost or kind in LOST, is_of_setup
        self.process, code = process, _EXIT_CODE.search(why)
        self.exit_code = int(code[1]) if code else None  # None: Ray has none
        self.last_line = next((line for line in reversed(why.splitlines()) if line.strip()), kind)


@contextlib.contextmanager
def limit(ref: Any, size_max: int) -> Iterator[None]:
    """Refuse the result if it is longer, before anything of it is copied."""
    _limits[ref.binary()] = size_max
    try:
        yield
    finally:
        del _limits[ref.binary()]


def _deserialize(self: Any, data: Any, metadata: bytes, object_ref: Any, out_of_band_tensors: Any = None) -> object:
    """In the place of Ray's own method of this name."""
    kind = metadata.split(b",")[0] if metadata else b""
    if kind == OBJECT_METADATA_TYPE_RAW:
        if data is None:
            return b""
        most = RESULT_BYTES_MAX if object_ref is None else _limits.get(object_ref.binary(), RESULT_BYTES_MAX)
        if memoryview(data).nbytes > most:
            return ActorFailed("TOO_LONG", f"it returned more than {most} bytes, which were not read")
        return data.to_pybytes()
    try:
        name = ErrorType.Name(int(kind))
    except ValueError:
        return ActorFailed("NOT_BYTES", "an actor returned something else than bytes, which was not read")
    return _failure(name, data)


def _failure(kind: str, data: Any) -> ActorFailed:
    """What Ray's core says of an error. An actor may forge it: nothing hangs on it but words, whether the death counts
    against its model, and of which process its node looks for a log.
    """
    if not data:
        return ActorFailed(kind)
    try:
        packed, _ = split_buffer(data)
        info = RayErrorInfo()
        info.ParseFromString(MessagePackSerializer.loads(packed, _refuse))
    except Exception:  # it is not what Ray's core writes: an actor has made it
        return ActorFailed(kind)
    died = info.actor_died_error
    context, creation = died.actor_died_error_context, died.creation_task_failure_context
    texts = (
        info.error_message, context.error_message, creation.formatted_exception_string,
        died.runtime_env_failed_context.error_message, died.oom_context.error_message,
    )  # fmt: skip
    why = next(filter(None, texts), "").partition(GUESSES)[0]
    return ActorFailed(
        kind, why[-WHY_CHARS:], is_lost=context.reason == NODE_DIED,
        is_of_setup=died.HasField("creation_task_failure_context"),
        process=(context.node_ip_address, context.pid) if context.pid else None,
    )  # fmt: skip


def _refuse(index: int) -> object:
    raise ValueError("a pickle")


def install() -> None:
    """Replace the method. Raises: RuntimeError if this Ray has no such method."""
    if not callable(getattr(SerializationContext, "_deserialize_object", None)):
        raise RuntimeError("this version of Ray is not supported: it reads results in another way")
    SerializationContext._deserialize_object = _deserialize


def verify(ray: Any) -> None:
    """Try it out on a connected Ray. Raises: RuntimeError if a pickle is read."""
    try:
        ray.get(ray.put(object()))
    except ActorFailed:
        return
    raise RuntimeError(f"Ray {ray.__version__} is not supported: it reads results in another way")

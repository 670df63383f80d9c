"""A source that is closed while another thread reads it."""

import threading

from batchmill.datasets.sources import SCATTERED_BYTES, ObjectSource
from batchmill.errors import StorageFailed
from batchmill.object_store.urls import ObjectInfo

SIZE = 64 * 1024 * 1024


class HeldStore:
    """Answers readers at once; what is prefetched is held until it may go on."""

    url = "s3://bucket"

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def get_range(self, info: ObjectInfo, start: int, end: int) -> bytes:
        if threading.current_thread().name.startswith("ranges"):
            self.may_answer.wait()
        return bytes(end - start)


def test_nobody_waits_for_what_is_not_fetched_any_more():
    """Two places are prefetched by one thread: the reader of what is only queued learns that the source was closed."""
    store = HeldStore()
    source = ObjectSource(store, ObjectInfo("a", SIZE, "etag"), streams=2)
    for place in (0, SIZE // 2):
        for start in (place, place + SCATTERED_BYTES):
            source.read_at(start, start + SCATTERED_BYTES)
    queued = next(start for start in source._ranges if start > SIZE // 2 + SCATTERED_BYTES)
    failures: list[str] = []

    def read() -> None:
        try:
            source.read_at(queued, queued + SCATTERED_BYTES)
        except StorageFailed as error:
            failures.append(error.message)

    waiting, future = threading.Event(), source._ranges[queued].data
    result = future.result
    future.result = lambda: (waiting.set(), result())[1]
    reader = threading.Thread(target=read)
    reader.start()
    waiting.wait()
    source.close()
    reader.join()
    store.may_answer.set()
    assert ["closed while it was read" in failure for failure in failures] == [True]

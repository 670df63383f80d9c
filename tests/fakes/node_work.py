"""Work for nodes of a cluster: `batchmill.executors.ray.node_tasks` calls it by name."""

import json
import os
import time
from pathlib import Path

from batchmill.owner_term import term_at
from batchmill.store.objects import StoreObjects
from batchmill.types.cluster import NodePlace


def wait(order: bytes, _: NodePlace) -> bytes:
    """Say in the file named by `order` which process this is, and never return."""
    path = Path(order.decode())
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    while True:
        time.sleep(3600)


def put(order: bytes, place: NodePlace) -> bytes:
    """Put the objects that `order` lists, each once a file of its name is there."""
    folder, names = json.loads(order)
    objects = StoreObjects(place.store, term_at(place.term))
    for name in names:
        while not Path(folder, f"{name}.go").exists():
            time.sleep(0.02)
        Path(folder, f"{name}.begun").touch()
        objects.put(name, b"data")
    return b"put"


def talk(order: bytes, _: NodePlace) -> bytes:
    return bytes(int(order))

"""A driver whose actors return, yield and raise pickles that run code: `python hostile_actor.py ADDRESS FILE`.

Prints what the driver gets. FILE exists afterwards if a pickle was read.
"""

import asyncio
import pathlib
import sys

import ray

from batchmill.executors.ray.bytes_only import ActorFailed, install, verify


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return pathlib.Path.touch, (pathlib.Path(self.path),)


class Trapped(Exception):
    def __reduce__(self) -> tuple:
        return pathlib.Path.touch, (pathlib.Path(sys.argv[2]),)


class Hostile:
    async def returned(self, path: str) -> Trap:
        return Trap(path)

    async def raised(self, path: str) -> bytes:
        sys.argv = ["", "", path]
        raise Trapped

    async def yielded(self, path: str):
        yield b"bytes"
        yield Trap(path)

    async def handle(self, path: str):
        return ray.get_runtime_context().current_actor


async def main() -> None:
    install()
    ray.init(address=sys.argv[1], log_to_driver=False)
    verify(ray)
    actor = ray.remote(Hostile).remote()
    for name in ("returned", "raised", "handle"):
        try:
            print("READ", await getattr(actor, name).remote(sys.argv[2]))
        except ActorFailed as error:
            print(name, error.kind)
    async for ref in actor.yielded.options(num_returns="streaming").remote(sys.argv[2]):
        try:
            print("yielded", await ref)
        except ActorFailed as error:
            print("yielded", error.kind)


asyncio.run(main())

"""A function behind mosec: `serve_mosec.py PORT double|solve BATCH_SIZE`. Runs in mosec's own environment."""

from __future__ import annotations

import sys
from importlib import import_module

from mosec import Server, Worker


class Single(Worker):
    """One row a call."""

    def forward(self, data: dict) -> dict:
        return {"data": 2 * data["data"]}


class Batched(Worker):
    """Rows that have come together."""

    def __init__(self) -> None:
        super().__init__()
        self.solve = import_module("solving").solve

    def forward(self, data: list[dict]) -> list[dict]:
        return [{"data": each} for each in self.solve([each["data"] for each in data])]


if __name__ == "__main__":
    port, name, size = sys.argv[1:]
    sys.argv = [sys.argv[0], "--port", port]  # which mosec reads itself
    server = Server()
    if name == "solve":
        server.append_worker(Batched, num=1, max_batch_size=int(size))
    else:
        server.append_worker(Single, num=1)
    server.run()

"""A function behind mosec: `serve_mosec.py PORT double|solve BATCH_SIZE`. Runs in mosec's own environment."""

from __future__ import annotations

import sys

from mosec import Server, Worker

PORT, NAME, BATCH_SIZE = sys.argv[1], sys.argv[2], int(sys.argv[3])

if NAME == "solve":
    import solving


class Single(Worker):
    """One row a call."""

    def forward(self, data: dict) -> dict:
        return {"data": 2 * data["data"]}


class Batched(Worker):
    """Rows that have come together."""

    def forward(self, data: list[dict]) -> list[dict]:
        return [{"data": each} for each in solving.solve([each["data"] for each in data])]


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "--port", PORT]  # which mosec reads itself
    server = Server()
    if NAME == "solve":
        server.append_worker(Batched, num=1, max_batch_size=BATCH_SIZE)
    else:
        server.append_worker(Single, num=1)
    server.run()

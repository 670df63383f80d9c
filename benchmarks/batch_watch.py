"""A batch of the other project on an engine that dies: how long it stands still after each death."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import harness
import live_server
from two_projects import Server

LOOK_S = 0.5
COUNTED_S = 3.0
FIRST_ROWS_S = 300.0
SETTLE_S, RESUME_MAX_S = 10.0, 120.0  # before a kill of the engine, and after it
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchWatch:
    """Starts the batch, and looks at it twice a second in a thread."""

    def __init__(self, server: Server, source: Path, model: str, address: str) -> None:
        self._server, self._address = server, address
        self._stop, self._stops_killing = threading.Event(), threading.Event()
        self._seen: list[tuple[float, int]] = []  # when, and how many rows were done
        self._failed = 0
        self._last: dict = {}
        self._closed = 0.0  # when it was looked at last
        self._id = self._start(live_server.named_rows(source, model))
        self._threads = [threading.Thread(target=self._look, daemon=True)]
        self._threads[0].start()

    def _ask(self, method: str, path: str, body: bytes, media: str = "application/json") -> dict:
        connection = http.client.HTTPConnection(
            self._server.host, self._server.port, timeout=60, source_address=(self._address, 0)
        )
        headers = {"Authorization": f"Bearer {self._server.other}", **({"Content-Type": media} if body else {})}
        try:
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise harness.CommandFailed(f"{method} {path}: {reply.status} {data[:500]!r}")
        return json.loads(data)

    def _start(self, source: Path) -> str:
        boundary = "boundary-of-a-benchmark"
        part = f'--{boundary}\r\nContent-Disposition: form-data; name="{{}}"{{}}\r\n\r\n'
        head = part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="in.jsonl"')
        data = head.encode() + source.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        file_id = self._ask("POST", "/v1/files", data, f"multipart/form-data; boundary={boundary}")["id"]
        asked = {"input_file_id": file_id, "endpoint": live_server.CHAT, "completion_window": "24h"}
        return self._ask("POST", "/v1/batches", json.dumps(asked).encode())["id"]

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            with contextlib.suppress(OSError, http.client.HTTPException, harness.CommandFailed):
                batch = self._ask("GET", f"/v1/batches/{self._id}", b"")
                self._last = batch
                self._failed = batch["request_counts"]["failed"]
                self._seen.append((time.monotonic(), batch["request_counts"]["completed"]))
                if batch["status"] in ENDED:
                    return

    def wait_for_rows(self) -> None:
        """Until the engine has started and rows are done."""
        try:
            harness.wait_until(
                lambda: bool(self._seen and self._seen[-1][1]), FIRST_ROWS_S, "the first rows of the batch"
            )
        except harness.CommandFailed as error:
            raise harness.CommandFailed(f"{error}:\n{self._last}\n{self._server.log.read_text()[-2000:]}") from None

    def kill_engines(self, times: int) -> None:
        """SIGKILL for the engine, so many times, each once the batch has gone on after the one before; in a thread."""

        def kill() -> None:
            for _ in range(times):
                if self._stops_killing.wait(SETTLE_S):
                    return
                before, deadline = self._done(), time.monotonic() + RESUME_MAX_S
                for pid in list(self._server.watch.cores):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                while self._done() <= before and time.monotonic() < deadline:
                    if self._stops_killing.wait(LOOK_S):
                        return

        self._threads.append(threading.Thread(target=kill, daemon=True))
        self._threads[-1].start()

    def _done(self) -> int:
        return self._seen[-1][1] if self._seen else 0

    def close(self) -> tuple[list[float], float, int]:
        """Seconds from each death to the next row that was done, waited for; the longest time without one; and the rows
        that failed."""
        self._stops_killing.set()
        with contextlib.suppress(harness.CommandFailed):
            harness.wait_until(self._has_gone_on, RESUME_MAX_S, "the batch to go on")
        self._closed = time.monotonic()
        self._stop.set()
        for thread in self._threads:
            thread.join()
        deaths = [self._stood_still(death) for death in self._server.watch.deaths]
        return deaths, self._longest_gap(), self._failed

    def _longest_gap(self) -> float:
        """From the first row on."""
        moved = [at for (at, done), (_, before) in zip(self._seen[1:], self._seen, strict=False) if done > before]
        if moved and self._last.get("status") not in ENDED:
            moved.append(self._closed)
        return max((later - earlier for earlier, later in itertools.pairwise(moved)), default=0.0)

    def _has_gone_on(self) -> bool:
        """After the last death."""
        if self._last.get("status") in ENDED or not self._server.watch.deaths or not self._threads[0].is_alive():
            return True
        return self._went_on_at(self._server.watch.deaths[-1]) is not None

    def _stood_still(self, death: float) -> float:
        went_on_at = self._went_on_at(death)
        if went_on_at is not None:
            return went_on_at - death
        return 0.0 if self._last.get("status") in ENDED else self._closed - death

    def _went_on_at(self, death: float) -> float | None:
        """What an engine had answered before it died is still counted for a while."""
        before = max((done for at, done in self._seen if at <= death + COUNTED_S), default=0)
        return min((at for at, done in self._seen if at > death + COUNTED_S and done > before), default=None)

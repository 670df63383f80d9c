"""A hub on loopback: what huggingface_hub asks of one to look at a model or a data set and to fetch its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_tests_0123456789"
_ID = r"(?P<id>(?:datasets/)?[^/]+/[^/]+)"
_API = re.compile(rf"/api/(?:models/)?{_ID}(?:/revision/(?P<revision>.+))?")
_FILE = re.compile(rf"/{_ID}/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class ModelHub:
    """`repositories`: id, of data sets datasets/ID -> file name -> bytes; of `private` ones only with TOKEN. `broken`
    requests get 503 first.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.claimed: dict[str, int] = {}  # file name -> a size that is not its own
        self.endless: set[str] = set()  # files of the size that is claimed, whose bytes do not end
        self.broken = 0
        self.asked: list[str] = []  # "METHOD path"
        self.held = threading.Event()  # files are sent once it is set
        self.held.set()
        self.released = threading.Event()  # of those that do not end, after their bytes
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> ModelHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.set()
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """What has huggingface_hub come here."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "HF_HUB_DISABLE_XET": "1"}

    def commit(self, repository: str) -> str:
        """The revision that is the newest now."""
        return hashlib.sha1(repr(sorted(self.repositories[repository].items())).encode()).hexdigest()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the request's
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(sends=False)

            def do_GET(self) -> None:
                self._answer(sends=True)

            def _answer(self, *, sends: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.asked.append(f"{self.command} {path}")
                if hub.broken > 0:
                    hub.broken -= 1
                    return self._say(503, {}, b"not now", sends)
                found = _API.fullmatch(path) or _FILE.fullmatch(path)
                repository = found["id"] if found else ""
                files = hub.repositories.get(repository)
                is_known = self.headers.get("authorization") == f"Bearer {TOKEN}"
                if repository in hub.gated:
                    return self._say(403, {"X-Error-Code": "GatedRepo"}, b"gated", sends)
                if files is None or (repository in hub.private and not is_known):
                    return self._say(401, {"X-Error-Code": "RepoNotFound"}, b"no such repository", sends)
                commit = hub.commit(repository)
                if found["revision"] not in (None, "main", commit):
                    return self._say(404, {"X-Error-Code": "RevisionNotFound"}, b"no such revision", sends)
                if "name" not in found.groupdict():
                    sizes = {name: hub.claimed.get(name, len(data)) for name, data in files.items()}
                    fields = {
                        "id": repository, "modelId": repository, "sha": commit, "private": False, "tags": [],
                        "siblings": [{"rfilename": name, "size": size} for name, size in sizes.items()],
                    }  # fmt: skip
                    return self._say(200, {"Content-Type": "application/json"}, json.dumps(fields).encode(), sends)
                data = files.get(found["name"])
                if data is None:
                    return self._say(404, {"X-Error-Code": "EntryNotFound"}, b"no such file", sends)
                if sends:
                    hub.held.wait()
                if found["name"] in hub.endless:
                    return self._say_on(hub.claimed[found["name"]], data, sends)
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                headers, status = {"ETag": etag, "X-Repo-Commit": commit}, 200
                if sends and (part := _RANGE.fullmatch(self.headers.get("range", ""))):
                    start, end = int(part[1]), min(int(part[2]) + 1, len(data))
                    if start >= end:
                        return self._say(416, headers, b"", sends)
                    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
                    data, status = data[start:end], 206
                return self._say(status, headers, data, sends)

            def _write(self, body: bytes) -> None:
                with contextlib.suppress(ConnectionError):  # the client was ended
                    self.wfile.write(body)

            def _say_on(self, claimed: int, data: bytes, sends: bool) -> None:
                self.send_response(200)
                self.send_header("ETag", '"endless"')
                self.send_header("X-Repo-Commit", hub.commit("datasets/team/rows"))
                if not sends:
                    self.send_header("Content-Length", str(claimed))
                self.send_header("Connection", "close")
                self.end_headers()
                if sends:
                    self._write(data)
                    hub.released.wait()

            def _say(self, status: int, headers: dict[str, str], body: bytes, sends: bool) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if sends:
                    self._write(body)

        return Handler

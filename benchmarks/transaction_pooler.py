"""A pooler that gives PostgreSQL's sessions to its clients for one transaction at a time, as pgbouncer with
`pool_mode = transaction` does. It takes clients without a password, and knows as much of the protocol as it needs.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from contextlib import suppress

SESSIONS = 8  # of the server, for all clients
SSL_REQUEST, GSS_REQUEST = 80877103, 80877104
READY, IDLE = b"Z", b"I"  # the server's message at the end of a query; outside of a transaction
ASKING = (b"Q", b"S")  # messages of a client that READY follows
TERMINATE = b"X"


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := sock.recv(size - len(data))):
            raise ConnectionError("the other side has closed the connection")
        data += piece
    return data


def _message(sock: socket.socket) -> tuple[bytes, bytes]:
    """(kind, the whole message)."""
    head = _exactly(sock, 5)
    return head[:1], head + _exactly(sock, struct.unpack("!I", head[1:])[0] - 4)


def _until_ready(sock: socket.socket) -> tuple[bytes, bool]:
    """(what the server says up to READY, whether it is outside of a transaction)."""
    said = b""
    while True:
        kind, data = _message(sock)
        said += data
        if kind == READY:
            return said, data[5:] == IDLE


class TransactionPooler:
    def __init__(self, port: int) -> None:
        self._target = port
        self._sessions: queue.Queue[socket.socket] = queue.Queue(SESSIONS)
        self._made = 0
        self._lock = threading.Lock()
        self._greeting = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            startup = self._startup(client)
            self._session(startup)
            client.sendall(self._greeting)
            while self._transaction(client):
                pass

    @staticmethod
    def _startup(client: socket.socket) -> bytes:
        while True:
            head = _exactly(client, 8)
            size, code = struct.unpack("!II", head)
            if code not in (SSL_REQUEST, GSS_REQUEST):
                return head + _exactly(client, size - 8)
            client.sendall(b"N")

    def _session(self, startup: bytes) -> None:
        """Make one more session of the server, until there are enough."""
        with self._lock:
            if self._made == SESSIONS:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            server.sendall(startup)
            self._greeting, _ = _until_ready(server)
            self._made += 1
            self._sessions.put(server)

    def _transaction(self, client: socket.socket) -> bool:
        """Pass one transaction on. False: the client has left."""
        kind, data = _message(client)
        if kind == TERMINATE:
            return False
        server = self._sessions.get()
        try:
            while True:
                server.sendall(data)
                if kind in ASKING:
                    said, is_over = _until_ready(server)
                    client.sendall(said)
                    if is_over:
                        return True
                kind, data = _message(client)
        finally:
            self._sessions.put(server)

"""The gRPC server: on the owner's loop, beside HTTP, with the same keys, limits and log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from batchmill.dialects.open_inference.grpc.bodies import SERVICE
from batchmill.dialects.open_inference.grpc.door import Door
from batchmill.dialects.open_inference.grpc.service import Service
from batchmill.errors import InvalidConfig
from batchmill.server.access_log import Served
from batchmill.server.admission.admission import Admission
from batchmill.server.auth import Gate
from batchmill.services.places import Places
from batchmill.services.services import Services

STREAMS_MAX = 1000  # calls of one connection that are under way; its client keeps the others waiting
HANDSHAKE_S = 15  # from a connection to HTTP/2
IDLE_S = 300  # a connection without a call is closed after so long; its client opens another when it has one
ROOM_BYTES = 64 * 1024  # a message is so much larger than a body of the same tensors


class GrpcServer:
    """Listens as soon as it is opened. `watchers` hear of every call that has ended."""

    def __init__(
        self, services: Services, gate: Gate, admission: Admission, watchers: Sequence[Callable[[Served], None]]
    ) -> None:
        config = services.config.server
        limit = config.body_bytes_max + ROOM_BYTES
        self._host, self._asked = config.host, config.grpc_port or 0
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),  # what a function returns has its limit elsewhere
            ("grpc.max_concurrent_streams", STREAMS_MAX),
            ("grpc.max_allowed_incoming_connections", max(1, admission.connections_max // 4)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            ("grpc.so_reuseport", 0),  # a port that somebody else has is taken, as it is for HTTP
        ]
        self._server = grpc.aio.server(options=options)
        hide = Places(services.config.data_dir).hide
        door = Door(gate, services.clock, hide=hide, watchers=watchers, admission=admission, bytes_max=limit)
        handlers = Service(services, door).handlers()
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = 0

    @property
    def address(self) -> str:
        """Where a client on this machine finds it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def open(self) -> None:
        """Raises: InvalidConfig when the address is taken."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{self._asked}")
        except RuntimeError:
            raise InvalidConfig(
                f"cannot listen on {host}:{self._asked} for gRPC: end what listens there, or choose another --grpc-port"
            ) from None
        await self._server.start()

    async def close(self, *, drain_s: float) -> None:
        """Take no further call and let those under way end, within the bound."""
        await self._server.stop(drain_s)

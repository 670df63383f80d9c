"""The least that a tensor server can be: it reads each request's bytes and sends the tensor's back.

`bare_tensors.py` prints the port of loopback that it listens on. It knows one request: FP32 [64, 1024], in binary.
"""

import json
import socket
import threading

SIZE = 64 * 1024 * 4
OUTPUT = {"name": "OUTPUT0", "datatype": "FP32", "shape": [64, 1024], "parameters": {"binary_data_size": SIZE}}
TOLD = json.dumps({"model_name": "identity", "model_version": "1", "outputs": [OUTPUT]}).encode()
HEAD = (
    f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: {len(TOLD)}\r\n"
    f"Content-Length: {len(TOLD) + SIZE}\r\n\r\n"
).encode() + TOLD


def serve(sock: socket.socket) -> None:
    """Answer one connection's requests until it ends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(2 * SIZE))
    while True:
        filled, end = 0, 0
        while filled == 0 or filled < end:
            got = sock.recv_into(buffer[filled:])
            if not got:
                return
            filled += got
            if not end and (at := bytes(buffer[: min(filled, 4096)]).find(b"\r\n\r\n")) >= 0:
                lines = bytes(buffer[:at]).lower().split(b"\r\n")
                length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                end = at + 4 + length
        sock.sendmsg([HEAD, bytes(buffer[end - SIZE : end])])


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main()

"""A function behind LitServe: `serve_litserve.py PORT`. Runs in LitServe's own environment."""

from __future__ import annotations

import sys

import litserve


class Double(litserve.LitAPI):
    def setup(self, device: str) -> None:
        """There is nothing to load."""

    def decode_request(self, request: dict) -> int:
        return request["data"]

    def predict(self, x: int) -> int:
        return 2 * x

    def encode_response(self, output: int) -> dict:
        return {"data": output}


if __name__ == "__main__":
    server = litserve.LitServer(Double(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False, log_level="warning")

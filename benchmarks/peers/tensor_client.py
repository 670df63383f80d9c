"""The published tritonclient, sending FP32 [64, 1024] and taking it back for some seconds.

`tensor_client.py http|grpc ADDRESS KEY IN_FLIGHT SECONDS` prints the answers a second; each is looked at.
"""

import importlib
import sys
import threading
import time
from collections import deque

import numpy as np

SHAPE = (64, 1024)


def main(kind, address, key, in_flight, seconds):
    triton = importlib.import_module(f"tritonclient.{kind}")
    is_http = kind == "http"
    client = triton.InferenceServerClient(address, **({"concurrency": in_flight} if is_http else {}))
    sent = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)
    tensor = triton.InferInput("INPUT0", list(SHAPE), "FP32")
    tensor.set_data_from_numpy(sent)
    headers = {"authorization": key}
    done = 0

    def look(answer, whole):
        got = answer.as_numpy("OUTPUT0")
        assert got.shape == SHAPE and (not whole or (got == sent).all()), "a wrong answer"

    def begin():
        if is_http:
            return client.async_infer("identity", [tensor], headers=headers)
        call = Call()
        client.async_infer("identity", [tensor], call.hear, headers=headers)
        return call

    look(client.infer("identity", [tensor], headers=headers), True)
    began = time.perf_counter()
    if in_flight == 1:
        while time.perf_counter() - began < seconds:
            look(client.infer("identity", [tensor], headers=headers), done % 64 == 0)
            done += 1
        return done / (time.perf_counter() - began)
    waiting = deque(begin() for _ in range(in_flight))
    while time.perf_counter() - began < seconds:
        look(waiting.popleft().get_result(), done % 64 == 0)
        waiting.append(begin())
        done += 1
    rate = done / (time.perf_counter() - began)
    for call in waiting:
        look(call.get_result(), False)
    return rate


class Call:
    """A call over gRPC that is waited for."""

    def __init__(self):
        self._is_over, self._heard = threading.Event(), None

    def hear(self, result, error):
        self._heard = result, error
        self._is_over.set()

    def get_result(self):
        self._is_over.wait()
        result, error = self._heard
        if error is not None:
            raise error
        return result


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))

"""The published tritonclient, sending FP32 [64, 1024] and taking it back, one call after the other, for some seconds.

`tensor_client.py http|grpc ADDRESS KEY SECONDS` says `ready`, begins at a line on its standard input, and prints the
answers a second; each is looked at. (Its `async_infer` over HTTP sleeps 10 ms a call: many clients are many processes.)
"""

import importlib
import sys
import time

import numpy as np

SHAPE = (64, 1024)


def main(kind, address, key, seconds):
    triton = importlib.import_module(f"tritonclient.{kind}")
    client = triton.InferenceServerClient(address)
    sent = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)
    tensor = triton.InferInput("INPUT0", list(SHAPE), "FP32")
    tensor.set_data_from_numpy(sent)
    done = 0

    def infer(whole):
        got = client.infer("identity", [tensor], headers={"authorization": key}).as_numpy("OUTPUT0")
        assert got.shape == SHAPE and (not whole or (got == sent).all()), "a wrong answer"

    infer(True)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        infer(done % 64 == 0)
        done += 1
    return done / (time.perf_counter() - began)


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))

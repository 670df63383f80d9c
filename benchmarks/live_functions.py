"""Single-row live requests to a function that does nothing, one worker, 64 connections: batchmill with keys, and peers.

Aims: 1.1 x mosec, 15 x LitServe, 25 x BentoML, 10 x Ray Serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deployed
import hammer
import harness

BODY, ANSWER = b'{"data": 10}', {"data": 20}
CODE = "def double(x: int) -> int:\n    return 2 * x\n"
# What runs each peer, its aim and its path: "PYTHON" and "PORT" are filled in.
PEERS = {
    "mosec": (("mosec==0.9.8", "numpy"), ["PYTHON", "serve_mosec.py", "PORT", "double", "1"], "/inference", 1.1),
    "litserve": (("litserve==0.2.19",), ["PYTHON", "serve_litserve.py", "PORT"], "/predict", 15),
    "bentoml": (
        ("bentoml==1.4.39",),
        ["PYTHON", "-m", "bentoml", "serve", "serve_bentoml:Double", "--port", "PORT"],
        "/double",
        25,
    ),
    "rayserve": (("ray[serve]==2.60.0",), ["PYTHON", "serve_ray.py", "PORT"], "/", 10),
}


@contextmanager
def ours() -> Iterator[hammer.Target]:
    with deployed.serving() as server:
        server.deploy("double", CODE)
        target = hammer.Target(server.port, "/v1/double/latest", BODY, server.key)
        assert hammer.ask(target) == ANSWER
        yield target


@contextmanager
def theirs(name: str) -> Iterator[hammer.Target]:
    requirements, command, path, _ = PEERS[name]
    filled = {"PYTHON": str(harness.peer_python(name, *requirements)), "PORT": str(hammer.free_port())}
    target = hammer.Target(int(filled["PORT"]), path, BODY)
    with hammer.peer(target, [filled.get(word, word) for word in command], ANSWER):
        yield target


def main() -> None:
    """Run batchmill and each peer in turn, and print the ratios."""
    arguments = harness.parse_arguments(__doc__, connections=64, seconds=5.0)
    p50: dict[str, list[float]] = {"batchmill": [], **{name: [] for name in PEERS}}

    def shoot(name: str) -> float:
        with ours() if name == "batchmill" else theirs(name) as target:
            hammer.fire(target, connections=arguments.connections, seconds=1.0)
            shot = hammer.fire(target, connections=arguments.connections, seconds=arguments.seconds)
        p50[name].append(shot.p50_ms)
        return shot.rate

    sides = {name: lambda name=name: shoot(name) for name in p50}
    figures = harness.alternate(arguments.pairs, sides)
    for name, rates in figures.items():
        harness.print_side(name, rates, "requests/s")
        harness.print_side(f"  {name}, median latency", p50[name], "ms")
    for name in PEERS:
        harness.print_ratio(figures["batchmill"], figures[name], PEERS[name][3], name)


if __name__ == "__main__":
    main()

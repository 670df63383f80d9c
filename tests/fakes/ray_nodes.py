"""A Ray cluster on this machine: `python ray_nodes.py PORT CPUS…`, one node for each number; PORT 0: any port.

It prints the head's address, and obeys lines on standard input: "drain N" (node N will be ended),
"remove N", "add CPUS NAME=VALUE…" (with these environment variables), "end".
Node N has the resource "nodeN". It runs in the environment that has Ray.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ray._private import node, ray_constants, services
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

AGENT = Path(__file__).with_name("no_agent.sh")
STORE_BYTES = int(os.environ.get("STORE_BYTES", 80 * 1024 * 1024))  # of a node
PREEMPTION = 2  # as Ray numbers the reasons to drain a node
NOTICE_S = 600.0


def leave_out_agents() -> None:
    """Start no dashboard and no agents, 0.5 s of a processor each: no worker of batchmill has a runtime environment.

    A raylet waits for the ports of its agents, and ends when one of them does.
    """
    command_of = services._build_python_executable_command_memory_profileable

    def command(kind: str, *args: object, **kwargs: object) -> list[str]:
        if kind in (PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT):
            return ["sh", str(AGENT)]
        return command_of(kind, *args, **kwargs)

    services._build_python_executable_command_memory_profileable = command
    node.Node.start_api_server = lambda *_, **__: None


def add(cluster: Cluster, nodes: list, cpus: int, variables: Sequence[str] = ()) -> None:
    node = cluster.add_node(
        num_cpus=cpus, object_store_memory=STORE_BYTES, resources={f"node{len(nodes) + 1}": 1},
        env_vars=dict(each.split("=", 1) for each in variables) or None,
    )  # fmt: skip
    nodes.append(node)


def main() -> None:
    leave_out_agents()
    ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES = STORE_BYTES
    port = {"gcs_server_port": int(sys.argv[1])} if sys.argv[1] != "0" else {}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": int(sys.argv[2]), "object_store_memory": STORE_BYTES, "no_monitor": True,
            "include_log_monitor": False, **port,
        },
    )  # fmt: skip
    nodes = []
    for cpus in sys.argv[3:]:
        add(cluster, nodes, int(cpus))
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["drain", number]:
                ends_at_ms = int(1000 * (time.time() + NOTICE_S))
                client = GcsClient(address=cluster.address)
                client.drain_node(nodes[int(number) - 1].node_id, PREEMPTION, "a spot machine ends", ends_at_ms)
            case ["remove", number]:
                cluster.remove_node(nodes[int(number) - 1], allow_graceful=False)
            case ["add", cpus, *variables]:
                add(cluster, nodes, int(cpus), variables)
            case ["end"]:
                break
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

"""A Ray cluster on this machine: `python ray_nodes.py PORT CPUS…`, one node for each number; PORT 0: any port.

It prints the head's address, and obeys lines on standard input: "remove N" (a node), "end". It runs in the environment
that has Ray.
"""

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 1024 * 1024


def main() -> None:
    port = {"gcs_server_port": int(sys.argv[1])} if sys.argv[1] != "0" else {}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": int(sys.argv[2]), "object_store_memory": STORE_BYTES, "include_dashboard": False, **port,
        },
    )  # fmt: skip
    nodes = [cluster.add_node(num_cpus=int(cpus), object_store_memory=STORE_BYTES) for cpus in sys.argv[3:]]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["remove", number]:
                cluster.remove_node(nodes[int(number) - 1], allow_graceful=False)
            case ["end"]:
                break
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

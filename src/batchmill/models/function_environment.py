"""What a function's process finds in its environment: little of ours, its own variables and secrets, its own GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from batchmill.errors import ModelFailed
from batchmill.models import devices, secrets
from batchmill.models.secrets import Secret
from batchmill.types import FunctionSpec

REPLICA_VARIABLE = "BATCHMILL_REPLICA"  # 0, 1, ... of the model's workers
# What a process needs of the machine it runs on. Nothing else of ours is user code's to see: keys lie there.
KEPT = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
        *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    }
)


def environment_of(
    function: FunctionSpec, ours: Mapping[str, str], resolve: Callable[[str], Secret] = secrets.resolve
) -> dict[str, str]:
    """The environment of a function's process. Raises: ModelFailed for a secret or a GPU that is not there."""
    chosen = {name: value for name, value in ours.items() if name in KEPT or name.startswith("LC_")}
    chosen |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # its folder never changes
    chosen[REPLICA_VARIABLE] = replica = ours.get(REPLICA_VARIABLE, "0")
    chosen |= function.environment
    chosen |= {name: resolve(reference).reveal() for name, reference in function.secrets.items()}
    chosen[devices.VISIBLE] = ",".join(_devices(function.gpus, int(replica), ours))
    return chosen


def _devices(count: int, replica: int, ours: Mapping[str, str]) -> list[str]:
    """The GPUs of this worker alone; none for a function that asks for none."""
    if not count:
        return []
    dealt = ours.get(devices.DEALT)
    if dealt is not None:
        return dealt.split(",")[:count]
    there = devices.visible(ours)
    mine = there[replica * count : (replica + 1) * count]
    if len(mine) < count:
        raise ModelFailed(
            f"worker {replica + 1} of a function with {count} GPUs a worker finds {len(mine)} of the {len(there)} "
            "GPUs of this machine left: ask for fewer workers or GPUs",
            code="too_few_gpus",
        )
    return mine

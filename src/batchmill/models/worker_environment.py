"""The environment variables of workers and of the processes of functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from batchmill.errors import ModelFailed
from batchmill.models import devices, redaction, secrets
from batchmill.models.secrets import Secret
from batchmill.types import FunctionSpec, ModelSpec
from batchmill.types.engine_traits import Source

REPLICA_VARIABLE = "BATCHMILL_REPLICA"  # 0, 1, ... of the model's workers
SECRET_WORDS, SECRET_CHARS_MIN = ("KEY", "SECRET", "TOKEN"), 8  # in the name of a variable whose value is a secret
# Variables that user code gets. The others may contain keys.
USER_CODE = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
        *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    }
)


_lent: set[str] = set()


def lend(variables: Mapping[str, str]) -> None:
    """Give this process variables that it lacks, for its own clients: user code does not get them."""
    for name in variables.keys() - os.environ.keys():
        os.environ[name] = variables[name]
        _lent.add(name)
        if any(word in name for word in SECRET_WORDS) and len(variables[name]) >= SECRET_CHARS_MIN:
            redaction.learn(variables[name])


def inherited() -> dict[str, str]:
    """The environment of this process without what was lent to it."""
    return {name: value for name, value in os.environ.items() if name not in _lent}


def environment_of(
    function: FunctionSpec, ours: Mapping[str, str], resolve: Callable[[str], Secret] = secrets.resolve
) -> dict[str, str]:
    """The environment of a function's process. Raises: ModelFailed for a missing secret or GPU."""
    variables = {name: value for name, value in ours.items() if name in USER_CODE or name.startswith("LC_")}
    variables |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # its folder never changes
    variables[REPLICA_VARIABLE] = replica = ours.get(REPLICA_VARIABLE, "0")
    variables |= function.environment
    variables |= {name: resolve(reference).reveal() for name, reference in function.secrets.items()}
    variables[devices.VISIBLE] = ",".join(_devices(function.gpus, int(replica), ours))
    return variables


def _devices(count: int, replica: int, ours: Mapping[str, str]) -> list[str]:
    """The GPUs of this worker; none for a function without GPUs."""
    if not count:
        return []
    assigned = ours.get(devices.ASSIGNED)
    if assigned is not None:
        return assigned.split(",")[:count]
    visible_devices = devices.visible(ours)
    own_devices = visible_devices[replica * count : (replica + 1) * count]
    if len(own_devices) < count:
        raise ModelFailed(
            f"worker {replica + 1} of a function with {count} GPUs a worker has {len(own_devices)} left of this "
            f"machine's {len(visible_devices)} GPUs: deploy it with fewer workers or GPUs",
            code="too_few_gpus",
        )
    return own_devices


# Variables that every process needs.
MACHINE = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "PYTHON*", "VIRTUAL_ENV"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "BATCHMILL_FAULT*"),
    }
)
HUB_CACHE = frozenset(
    {
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"),
        *("TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    }
)
PROXIES = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    }
)
DEVICES = frozenset(
    {
        *("CUDA_*", "NVIDIA_*", "HIP_*", "HSA_*", "ROCR_*", "ROCM_*", "BATCHMILL_GPUS", "BATCHMILL_REPLICA"),
        *("OMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "GOMP_*", "TORCH*", "PYTORCH_*"),
    }
)
VLLM = frozenset(
    {
        *("VLLM_*", "HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "NCCL_*", "GLOO_*"),
        *("RAY_*", "TRITON_*", "FLASHINFER_*", "CUDNN_*", "CUBLAS_*", "MIOPEN_*", "TPU_*", "XLA_*", "CC", "CXX"),
        "BATCHMILL_VLLM_PYTHON",
    }
)
AWS_CHAIN = frozenset({"AWS_*"}) | PROXIES  # without configured keys: the variables that AWS's own tools read
AWS_PLACE = frozenset({"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE", "AWS_ENDPOINT_URL*"})
# For children that fetch adapters from model hubs and object stores.
FETCHERS = PROXIES | {"HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "AWS_*", "GOOGLE_*", "AZURE_*"}
AWS_PROVIDERS, OBJECT_STORE = frozenset({"sagemaker", "bedrock"}), "s3://"


# Groups of variables that `EngineTraits.environment` names.
GROUPS = {"devices": DEVICES, "user_code": USER_CODE, "hub_cache": HUB_CACHE, "proxies": PROXIES, "vllm": VLLM}


def chosen(ours: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The variables of `ours` that match one of the names or patterns ("AWS_*")."""
    patterns = list(names)
    exact_names = {name for name in patterns if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in patterns if name.endswith("*"))
    return {name: value for name, value in ours.items() if name in exact_names or name.startswith(prefixes)}


def of_helpers(ours: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Variables for a child process that runs only batchmill: it reads, checks, parses and writes files."""
    return chosen(ours, (*MACHINE, *HUB_CACHE, *more))


def of_worker(model: ModelSpec, ours: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Variables for a worker of this model.

    Args:
        more: names that the operator of the machine adds.
    """
    return chosen(ours, (*MACHINE, *_of_engine(model), *more))


def of_placed_worker(model: ModelSpec, ours: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Variables of this machine for a worker on another one, which has its own paths, proxies of fetchers and devices.

    Args:
        more: as for `of_worker`.
    """
    own = chosen(ours, (*MACHINE, *DEVICES, *USER_CODE, "RAY_*", "CC", "CXX"))
    wanted = chosen(ours, (*_of_engine(model), *more))
    named = chosen(ours, more)
    return {name: value for name, value in wanted.items() if name not in own or name in named}


def _of_engine(model: ModelSpec) -> frozenset[str]:
    traits = model.traits
    names = frozenset().union(*(GROUPS.get(each, frozenset({each})) for each in traits.environment))
    if model.provider in AWS_PROVIDERS:
        return names | (AWS_PLACE if _names_its_keys(model) else AWS_CHAIN)
    weights = (model.source, *model.adapters.values()) if traits.source is Source.WEIGHTS else ()
    return names | AWS_CHAIN if any(source.startswith(OBJECT_STORE) for source in weights) else names


def _names_its_keys(model: ModelSpec) -> bool:
    """Whether a model of an AWS service has its keys by reference, or must have them so."""
    if model.connector is not None:
        return "access_key" in model.connector.credential or not model.connector.is_trusted
    return bool(model.engine_args.get("access_key"))

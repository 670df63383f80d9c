"""Has vLLM fork its engine, in the place of a new interpreter that would import vLLM again: 10 s of a processor less.

Without a GPU vLLM starts new interpreters. It forks where it may (`VLLM_WORKER_MULTIPROC_METHOD`), so its code expects
both. `python.sh` puts this folder on the path.
"""

import multiprocessing

_get_context = multiprocessing.get_context


def get_context(method=None):
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = get_context

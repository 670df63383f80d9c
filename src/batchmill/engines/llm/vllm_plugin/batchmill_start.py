"""Starts vLLM's server. It runs in vLLM's environment and imports nothing else of batchmill.

vLLM and PyTorch create millions of objects when they are imported, and all of them stay. Python's garbage collector
would look at them again and again, which takes a fifth of the processor time of a start. Here it looks less often. A
process that vLLM starts anew imports this module before any other, because it is the main one.
"""

import gc
import runpy

OBJECTS = 10_000  # created since the last collection, and not yet deleted; Python's default is 700

gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])
if __name__ == "__main__":
    # `alter_sys` is left out: it would make vLLM's module the main one.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

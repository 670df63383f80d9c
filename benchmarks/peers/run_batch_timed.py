"""vLLM's own batch command, `run_batch`, with two timestamps and nothing else changed.

`run_batch_timed.py TIMES.json -i INPUT -o OUTPUT --model … [engine flags]`: TIMES gets `first_request`, taken when
every request is about to be handed to the engine, which is up by then, and `last_result`, taken when the last has
come back and before the output file is written. Runs in the environment that holds vLLM.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from vllm.entrypoints.launchers import run_batch

TIMES = Path(sys.argv.pop(1))
times: dict[str, float] = {}


class TimedTracker(run_batch.BatchProgressTracker):
    """vLLM's progress tracker: its bar opens right before the requests start."""

    def pbar(self):
        """Open the bar, as vLLM does, and note when."""
        times["first_request"] = time.time()
        return super().pbar()

    def completed(self):
        """Count a reply, as vLLM does, and note when."""
        super().completed()
        times["last_result"] = time.time()


if __name__ == "__main__":
    run_batch.BatchProgressTracker = TimedTracker
    asyncio.run(run_batch.main(run_batch.parse_args()))
    TIMES.write_text(json.dumps(times))

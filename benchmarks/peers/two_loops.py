"""Two bare processes, each with half of the rows and a core of its own: `two_loops.py INPUT OUTPUT`.

Each reads lines, calls the function of `functions.py` that takes 50 us, and writes lines, with orjson and nothing else.
"""

import os
import sys
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import functions  # noqa: E402

PARTS = 2


def run(source: str, output: str, part: int) -> None:
    """The rows whose lines begin in this part of the file."""
    size = os.path.getsize(source)
    first, end = size * part // PARTS, size * (part + 1) // PARTS
    with open(source, "rb", buffering=1 << 20) as lines, open(f"{output}.{part}", "wb", buffering=1 << 20) as results:
        lines.seek(max(first - 1, 0))
        at = lines.tell() + (len(lines.readline()) if first else 0)
        for line in lines:
            if at >= end:
                break
            at += len(line)
            row = orjson.loads(line)
            body = functions.fifty_us(**row["body"])
            result = {
                "id": "batch_req",
                "custom_id": row["custom_id"],
                "response": {"status_code": 200, "request_id": "req", "body": body},
                "error": None,
            }
            results.write(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))


def main() -> None:
    """Run all parts at once, and wait for them."""
    source, output = sys.argv[1:]
    children = []
    for part in range(PARTS):
        pid = os.fork()
        if pid == 0:
            run(source, output, part)
            os._exit(0)
        children.append(pid)
    for pid in children:
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a part has failed")


if __name__ == "__main__":
    main()

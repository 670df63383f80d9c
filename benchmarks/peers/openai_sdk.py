"""The openai SDK's async client over the same rows: `openai_sdk.py INPUT OUTPUT BASE_URL IN_FLIGHT`.

Prints the seconds from the first request to the last result.
"""

import asyncio
import json
import sys
import time

import openai


async def run(source: str, output: str, base_url: str, in_flight: int) -> float:
    """Call `chat.completions.create` for every row, write every reply; return the seconds it took."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    with open(source) as file, open(output, "w") as results:
        rows = iter(map(json.loads, file))

        async def work() -> None:
            for row in rows:
                reply = await client.chat.completions.create(**{**row["body"], "model": "bench"})
                results.write(f'{{"custom_id":"{row["custom_id"]}","body":{reply.model_dump_json()}}}\n')

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(in_flight)))
        return time.perf_counter() - began


if __name__ == "__main__":
    print(asyncio.run(run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))

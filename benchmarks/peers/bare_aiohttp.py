"""The least that a batch to an endpoint can be: aiohttp, a fixed number in flight, no retries, nothing durable.

`bare_aiohttp.py INPUT OUTPUT BASE_URL IN_FLIGHT [PATH]` prints the seconds from the first request to the last result.
"""

import asyncio
import sys
import time

import aiohttp
import orjson


async def run(source: str, output: str, base_url: str, in_flight: int, path: str = "/chat/completions") -> float:
    """Post every row's body, write every reply; return the seconds it took."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    url = base_url + path
    with open(source, "rb") as file, open(output, "wb", buffering=1 << 20) as results:
        lines = iter(file)

        async def work(session: aiohttp.ClientSession) -> None:
            for line in lines:
                row = orjson.loads(line)
                async with session.post(url, data=orjson.dumps(row["body"]), headers=headers) as response:
                    reply = await response.read()
                    status = response.status
                results.write(b'{"custom_id":"%b","status_code":%d,"body":' % (row["custom_id"].encode(), status))
                results.write(reply + b"}\n")

        async with aiohttp.ClientSession(connector=connector) as session:
            began = time.perf_counter()
            await asyncio.gather(*(work(session) for _ in range(in_flight)))
            took_s = time.perf_counter() - began
    return took_s


if __name__ == "__main__":
    print(asyncio.run(run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])))

"""URLs as inputs of jobs at a server: it downloads them, with the guard of every URL that callers give."""

import pytest
from dialects.open_server import CONFIG, open_server
from fakes.web_files import WebFile, web_files

from batchmill.client.asynchronous import AsyncClient
from batchmill.errors import BatchmillError

ALLOWED = '[server]\nprivate_hosts = ["127.0.0.1"]\n'


@pytest.fixture(scope="module")
def web():
    with web_files() as served:
        served.files["/rows.jsonl"] = WebFile(b'{"n": 1}\n{"n": 2}\n')
        yield served


async def test_a_server_downloads_for_callers(web, tmp_path):
    """A URL beside an upload; the view has the URL, and no path of the server."""
    url = f"{web.url}/rows.jsonl"
    (tmp_path / "more.jsonl").write_text('{"n": 9}\n')
    async with open_server(tmp_path, CONFIG + ALLOWED) as running, AsyncClient(running.url, "none") as client:
        report = await client.validate(url, model="double")
        assert report.seal.rows == 2 and report.seal.files[0].path == report.seal.sources[0].path == url
        job = await client.submit([url, tmp_path / "more.jsonl"], model="double")
        view = await job.wait()
        assert (view.state, view.rows_ok, view.input[0]) == ("completed", 3, url)
        refused = {
            f"{web.url}/none.jsonl": "no_such_url",
            "https://169.254.169.254/latest/meta-data": "url_not_allowed",
            "http://example.com/rows.jsonl": "url_not_allowed",
            "hf://datasets/team/rows/a.jsonl": "url_not_allowed",
            "https://user:word@example.com/rows.jsonl": "url_not_allowed",
        }
        for bad, code in refused.items():
            for call in (client.submit, client.validate):
                with pytest.raises(BatchmillError) as error:
                    await call(bad, model="double")
                assert error.value.code == code, bad


async def test_private_addresses_are_refused(web, tmp_path):
    async with open_server(tmp_path) as running, AsyncClient(running.url, "none") as client:
        with pytest.raises(BatchmillError, match="private") as error:
            await client.submit(f"{web.url.replace('http', 'https')}/rows.jsonl", model="double")
        assert error.value.code == "url_not_allowed"

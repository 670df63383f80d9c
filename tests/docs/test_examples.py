"""The examples of the README and the task pages, run as they stand there."""

import ast
import contextlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from docs.pages import Session, read_page
from fakes.openai_service import Answer, OpenAIService, refusal

from batchmill.cli import session as cli_session
from batchmill.states import PauseReason
from batchmill.wire.rows.rendered_rows import ROW_FAULTS

ROOT = Path(__file__).parents[2]
FAKE_ENGINE = ROOT / "tests" / "fakes" / "engine_server.py"
SHOWN_SERVICE = "127.0.0.1:8000"
SHOWN_PORTS = ("8080", "8001", "9100")  # of servers that a page starts itself
TASK_PAGES = [
    "README.md",
    "docs/run-a-batch.md",
    "docs/results.md",
    "docs/reuse.md",
    "docs/python-and-data-frames.md",
    "docs/use-a-function.md",
    "docs/functions.md",
    "docs/use-a-language-model.md",
    "docs/prompt-templates.md",
    "docs/media.md",
    "docs/adapters.md",
    "docs/deploy-a-language-model.md",
    "docs/use-a-remote-service.md",
    "docs/connectors.md",
    "docs/secrets.md",
    "docs/serve.md",
    "docs/open-inference.md",
    "docs/open-inference-grpc.md",
    "docs/inferless.md",
    "docs/python-sdk.md",
    "docs/webhooks-and-metrics.md",
    "docs/when-it-goes-wrong.md",
    "docs/modelbit.md",
    "docs/predibase.md",
    "docs/opensearch-ml-commons.md",
]
PAGES = [  # those with a test of their own too
    *TASK_PAGES, "docs/structured-output.md", "docs/data-in-an-object-store.md", "docs/configuration.md",
    "docs/deploy.md", "docs/security.md",
]  # fmt: skip
# Where vLLM is, `test_the_readme_holds_with_a_real_model` follows the README with it, in the place of the stand-in.
FOLLOWED = TASK_PAGES[1:] if os.environ.get("BATCHMILL_VLLM_PYTHON") else TASK_PAGES

# What the service of the pages says to a prompt that holds this; to any other it answers "positive".
ANSWERS = {
    "as JSON: It meets": '{"label": "positive", "score": 0.9}', "as JSON: No": "sorry", "it is not JSON": "sorry",
    "as JSON: It cannot": '{"label": "unsure", "score": 0.5}', '"unsure"': '{"label": "neutral", "score": 0.5}',
    "Broke": "negative", "cannot say": "neutral",
}  # fmt: skip
REFUSALS = {
    "too long": refusal(400, "context_length_exceeded", "This model's maximum context length is 8192 tokens."),
    "no money": refusal(429, "insufficient_quota", "You exceeded your current quota."),
    "no key": refusal(401, "invalid_api_key", "Incorrect API key provided."),
}


class PageService(OpenAIService):
    """The service that the pages call at 127.0.0.1:8000."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script()


class Script(dict):
    """Answers by what a prompt holds, however often it is sent."""

    def get(self, text: str, default: object = None) -> list[Answer]:
        for mark, answer in REFUSALS.items():
            if mark in text:
                return [answer]
        content = next((said for mark, said in ANSWERS.items() if mark in text), "positive")
        usage = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return [Answer(200, {"id": "c-1", "object": "chat.completion", "choices": [choice], "usage": usage})]


def stand_in_engine(folder: Path) -> dict[str, str]:
    """The environment of a Python in which vLLM is the stand-in of the tests."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    run = f"import runpy\nrunpy.run_path({str(FAKE_ENGINE)!r}, run_name='__main__')\n"
    (package / "api_server.py").write_text(run)
    return {"BATCHMILL_VLLM_PYTHON": sys.executable, "PYTHONPATH": str(folder)}


def free_ports(shown: tuple[str, ...]) -> dict[str, str]:
    """A port that is free for each one that pages show."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in shown]
        return {port: str(each.getsockname()[1]) for port, each in zip(shown, sockets, strict=True)}


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short, as a user's is: tables cut longer ones."""
    with tempfile.TemporaryDirectory(prefix="page-") as place:
        yield Path(place)


async def follow(
    page: str, home: Path, environ: dict[str, str], *, addresses: Mapping[str, str] | None = None,
    is_preloaded: bool = True,
) -> None:  # fmt: skip
    """Do what a page says, in a folder that holds the examples.

    Args: addresses: further ones that the page shows, as they are.
    """
    folder = home / "ada"
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"PATH": path, "BATCHMILL_DATA_DIR": str(home / "data"), "HF_HUB_OFFLINE": "1", **environ}
    steps = read_page((ROOT / page).read_text())
    async with PageService() as service:
        real = {SHOWN_SERVICE: f"127.0.0.1:{service.port}", **(addresses or {}), **free_ports(SHOWN_PORTS)}
        async with Session(folder, environ, real, is_preloaded=is_preloaded) as session:
            await session.follow(steps)


@pytest.mark.parametrize("page", FOLLOWED)
@pytest.mark.timeout(300)
async def test_a_page_does_what_it_says(page: str, home: Path):
    """Every command of a page can be typed as it stands there, and prints what the page says it prints."""
    await follow(page, home, stand_in_engine(home / "site"))


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_the_readme_holds_with_a_real_model(home: Path):
    """What the README says of the language model and its adapters is what vLLM answers."""
    assert os.environ.get("BATCHMILL_VLLM_PYTHON"), "BATCHMILL_VLLM_PYTHON names no Python that has vLLM"
    await follow("README.md", home, {}, is_preloaded=False)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    """Every relative link of a page names a file of the repository, and a heading that it has."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        place, _, heading = target.partition("#")
        file = (ROOT / page).parent / place if place else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if heading:
            found = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found]
            assert heading in slugs, f"{page} links to {target}; there are {slugs}"


def codes_of(folder: Path) -> set[str]:
    """Every error code that the modules of a folder give to a dataset or a row."""
    places = {"RowError": 0, "Problem": 0, "Rejection": 1, "_refuse": 1, "Refused": 2}
    found: set[str] = set()
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        for node in ast.walk(tree):
            values: list[ast.AST] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                values = [each.value for each in node.keywords if each.arg == "code"]
                values += node.args[places[name] : places[name] + 1] if name in places else []
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
                values = [node.value]
            for value in values:
                found |= constants_of(named.get(ast.unparse(value), value))
    return found


def constants_of(value: ast.AST) -> set[str]:
    """The strings that an expression may be; "invalid_{name}" is one for each field of a row that must be text."""
    if isinstance(value, ast.JoinedStr):
        head = value.values[0]
        assert isinstance(head, ast.Constant) and head.value == "invalid_", ast.unparse(value)
        return {"invalid_custom_id", "invalid_url", "invalid_method"}
    if isinstance(value, ast.IfExp):
        return constants_of(value.body) | constants_of(value.orelse)
    return {value.value} if isinstance(value, ast.Constant) and isinstance(value.value, str) else set()


def table_of(page: str, heading: str) -> list[str]:
    """The first cell of every line of the tables below a heading, without its backticks."""
    text = (ROOT / page).read_text()
    part = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [name for line in lines for name in line.split("|")[1].replace("`", "").replace(",", " ").split()]


def test_every_code_of_validation_is_explained():
    """The page on what goes wrong names the codes that validation uses: all of them, and no other."""
    datasets = ROOT / "src" / "batchmill" / "datasets"
    found = codes_of(datasets) | codes_of(datasets / "checking")
    found |= {"missing_prompt", "missing_column"}  # of wire.rows.forms, for a row of a table
    found |= {*ROW_FAULTS, "invalid_template"}  # of datasets.templates and datasets.media
    found.add("missing_dependency")  # of batchmill.optional
    found.add("too_many_objects")  # of object_store.store, for a folder or a glob
    assert sorted(table_of("docs/when-it-goes-wrong.md", "Codes of validation")) == sorted(found)


def test_every_pause_and_exit_code_is_explained():
    """The page on what goes wrong names every reason for a pause and every exit code."""
    page = "docs/when-it-goes-wrong.md"
    assert sorted(table_of(page, "Why a job pauses")) == sorted(PauseReason)
    codes = [value for name, value in vars(cli_session).items() if name.startswith("EXIT_")]
    assert sorted(map(int, table_of(page, "Exit codes"))) == sorted(codes)


def test_shown_rows_are_json():
    """Every JSON block on the pages is one value or one on each line; of a JSONL block each line is."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        for kind, block in re.findall(r"^```(jsonl?)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            try:
                json.loads(block)
            except ValueError:
                assert "{\n" not in block or kind == "jsonl", f"{page}: {block}"
                for line in block.splitlines():
                    json.loads(line)

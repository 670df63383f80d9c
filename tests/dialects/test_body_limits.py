"""How long the bodies of all operations may be."""

from open_server import open_server

from batchmill.dialects import load_dialects
from batchmill.server.operations import BODY_BYTES_MAX

# Operations whose bodies hold what models are called with: as long as `server.body_bytes_max`.
CALLS = {
    "createChatCompletion", "createCompletion", "createResponse", "createEmbedding", "createRerank", "createScore",
    "callModel", "callDeployment*", "inferModel*", "generate*", "callInferlessApp*", "predictModel",
    "predictWithAlgorithm", "batchPredictModel", "lorax*", "deployment*",
}  # fmt: skip
# Those whose bodies go to the disk as they come, with limits of their own.
UPLOADS = {"createFile", "addUploadPart", "putDataset", "storeFile", "deploy", "uploadAdapter"}


def is_call(name: str) -> bool:
    return any(name == each or (each[-1] == "*" and name.startswith(each[:-1])) for each in CALLS)


async def test_each_operation_takes_no_more_than_it_needs(tmp_path):
    """Calls of models take the server's limit, uploads their own; all else, also what is new, the default."""
    async with open_server(tmp_path) as running:
        found = [each for dialect in load_dialects(running.services) for each in dialect.operations()]
        server_max = running.services.config.server.body_bytes_max
    for each in found:
        if each.body is None:
            continue
        limit = each.bytes_max(server_max)
        if each.name in UPLOADS:
            assert each.is_upload and limit == each.body_bytes_max > BODY_BYTES_MAX, each.name
        elif is_call(each.name):
            assert not each.is_upload and limit == server_max, each.name
        else:
            assert not each.is_upload and limit == BODY_BYTES_MAX, each.name
        assert each.is_upload or each.bytes_max(1000) == 1000, each.name
    assert {each.name for each in found} >= UPLOADS

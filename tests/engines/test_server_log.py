"""What is told of a server's log."""

from batchmill.engines.llm.server import LINE_CHARS_MAX, error_lines, read_tail

VLLM = """\
(APIServer pid=1) INFO 11-21 19:20:01 [utils.py:1] args: {}
(EngineCore pid=9) ERROR 11-21 19:20:03 [core.py:900] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-21 19:20:03 [core.py:900]   File "core.py", line 3, in run
(EngineCore pid=9) ERROR 11-21 19:20:03 [core.py:900] ValueError: No available memory for the cache blocks.
(EngineCore pid=9) Process EngineCore:
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "api_server.py", line 1, in <module>
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_root_cause_is_found_behind_the_last_exception():
    """An exception that only points at an earlier one is passed over."""
    assert error_lines(VLLM) == "ValueError: No available memory for the cache blocks."


def test_the_lines_that_belong_to_an_exception_come_with_it():
    """A validation error over several lines is told whole, without the advertisement at its end."""
    log = (
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no such dir\n    For further"
    )
    assert error_lines(log).splitlines()[:2] == [
        "pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "Value error, no such dir",
    ]


def test_a_wrong_flag_is_told():
    """What argparse says about a flag counts as telling."""
    log = "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --foo\n"
    assert error_lines(log) == "api_server.py: error: unrecognized arguments: --foo"


def test_a_log_without_an_exception_gives_its_last_lines():
    """Where nothing looks like an error, the last five lines are told, cut at their limit."""
    log = "\n".join(f"line {i}" for i in range(9)) + "\n" + "x" * (LINE_CHARS_MAX + 1)
    assert error_lines(log).splitlines() == ["line 5", "line 6", "line 7", "line 8", "x" * LINE_CHARS_MAX]


def test_only_what_was_written_since_is_read(tmp_path):
    """The tail begins at the offset, or at the start of a log that was begun anew, and a missing log is empty."""
    log = tmp_path / "a.log"
    assert read_tail(log) == ""
    log.write_text("old\nnew\n")
    assert read_tail(log, 4) == "new\n"
    assert read_tail(log, 400) == "old\nnew\n"

"""Data-frame mode: many rows are one frame and one call."""

from __future__ import annotations

import importlib.util

import pytest
from dialects.modelbit.modelbit_kit import deploy, open_deployments

needs_pandas = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed here")


@needs_pandas
async def test_one_frame_for_many_rows(tmp_path):
    """M25: the ids are the index of one frame, and row i of what the function returns belongs to id i."""
    async with open_deployments(tmp_path) as deployed:
        await deploy(deployed.running, "frames", frame_columns=["a", "b"])
        await deploy(deployed.running, "short_frames", frame_columns=["a", "b"])
        data = [[10, {"a": 1, "b": "x"}], [11, {"a": 2, "b": "y"}]]
        assert await deployed.answer("frames/latest", data) == [[10, "10:1x"], [11, "11:2y"]]
        text = await deployed.error("short_frames/latest", data, 400)
        assert "1" in text and "2" in text and text.split("\n")[-1].startswith("BadReturn: ")

"""Data-frame mode: many rows are one frame and one call. pandas is in the environment of Modelbit's own client."""

from __future__ import annotations

import asyncio
import venv

import pytest
from dialects.modelbit.modelbit_kit import deploy, open_deployments
from story.client_envs import client_python

from batchmill.errors import ModelFailed

DATA = [[10, {"a": 1, "b": "x"}], [11, {"a": 2, "b": "y"}]]


async def test_one_frame_for_many_rows(tmp_path):
    """M25: the ids are the index of one frame, and row i of what the function returns belongs to id i."""
    python = client_python("modelbit")
    async with open_deployments(tmp_path) as deployed:
        for name in ("frames", "short_frames"):
            await deploy(deployed.running, name, frame_columns=["a", "b"], python=python)
        assert await deployed.answer("frames/latest", DATA) == [[10, "10:1x"], [11, "11:2y"]]
        assert await deployed.answer("frames/latest", DATA[::-1]) == [[11, "11:2y"], [10, "10:1x"]]
        text = await deployed.error("short_frames/latest", DATA, 400)
        assert "1" in text and "2" in text and text.split("\n")[-1].startswith("BadReturn: ")
        reply = (await deployed.http.get("/v1/frames/latest")).json()
        assert reply["dataframe_mode"] and [each["name"] for each in reply["arguments"]] == ["a", "b"]


async def test_two_arguments_are_refused(tmp_path):
    """M27: a function of two arguments cannot take frames, in Modelbit's words."""
    async with open_deployments(tmp_path) as deployed:
        with pytest.raises(ModelFailed, match="Deployments using DataFrame Mode can only have one argument."):
            await deploy(deployed.running, "echo3", frame_columns=["a"], python=client_python("modelbit"))


async def test_an_environment_without_pandas_is_refused(tmp_path):
    """A function that takes frames is refused at deploy where there are none."""
    await asyncio.to_thread(venv.create, tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare" / "bin" / "python")
    async with open_deployments(tmp_path) as deployed:
        with pytest.raises(ModelFailed, match="no pandas"):
            await deploy(deployed.running, "frames", frame_columns=["a", "b"], python=bare)

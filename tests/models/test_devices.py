"""Which GPUs models share: those that are visible, or as many of them as the machine's table says."""

from __future__ import annotations

import pytest

from batchmill.errors import InvalidConfig
from batchmill.models import devices


@pytest.mark.parametrize(
    ("expected", "visible", "found"),
    [
        (None, "0,3", ["0", "3"]),
        (None, "", []),
        (1, "0,3", ["0"]),
        (0, "0,3", []),
        (2, "", ["0", "1"]),
        ([3, "MIG-1"], "0", ["3", "MIG-1"]),
        ([], "0", []),
    ],
)
def test_the_devices_that_models_share(expected, visible, found):
    """A count takes the first that are visible; ids are taken as they are."""
    assert devices.shared(expected, {"CUDA_VISIBLE_DEVICES": visible}) == found


def test_no_more_than_are_there():
    """A count beyond what is visible is refused with both."""
    with pytest.raises(InvalidConfig, match=r"machine\.gpus is 3 and 2 are visible: 0, 1"):
        devices.shared(3, {"CUDA_VISIBLE_DEVICES": "0,1"})

"""What holds for all tests: those that need a GPU are skipped where there is none, and no property is timed."""

from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no fault of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

HAS_GPU = Path("/dev/nvidiactl").exists()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without an NVIDIA device."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA device"))

"""torchvision beside a CPU build of torch: it imports, and who asks whether it is there does not load torch."""

import subprocess
import sys
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[2] / "requirements/torchvision_cpu.py"
TORCH = """
import sys, types
version = types.SimpleNamespace(cuda=None)
defined = []

class Library:
    def __init__(self, name, kind): pass
    def define(self, signature): defined.append(signature)

library = types.SimpleNamespace(Library=Library)
if "waiting" in sys.argv:
    sys.begun.set()
    assert sys.asked.wait(20), "who asks for torchvision waits for torch"
    import colorsys  # takes Python's lock on all imports
"""
TORCHVISION = "import torch; assert [each.partition('(')[0] for each in torch.defined] == ['nms', 'qnms']"
ASKS = """
import importlib.util, sys
assert importlib.util.find_spec("torchvision").name == "torchvision"
assert "torch" not in sys.modules
import torchvision
"""
ASKS_MEANWHILE = """
import importlib.util, sys, threading
sys.begun, sys.asked = threading.Event(), threading.Event()
loading = threading.Thread(target=lambda: __import__("torch"))
loading.start()
assert sys.begun.wait(20)
assert importlib.util.find_spec("torchvision")
sys.asked.set()
loading.join(20)
assert not loading.is_alive()
import torchvision
"""


@pytest.mark.parametrize(
    ("program", "arguments"), [(ASKS, ()), (ASKS_MEANWHILE, ("waiting",))], ids=["alone", "beside"]
)
def test_who_asks_for_torchvision_loads_no_torch(tmp_path: Path, program: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "torchvision.py").write_text(TORCHVISION)
    (tmp_path / HELPER.name).write_bytes(HELPER.read_bytes())
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torchvision_cpu\n{program}"
    # Isolated: the helper that is installed here would answer first.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr

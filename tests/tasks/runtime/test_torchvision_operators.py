"""torchvision beside a CPU build of torch: transformers imports it, and no Python of the environment is changed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

MODEL = """
import sys
from tasks.runtime.torchvision_operators import declare_torchvision_operators
declare_torchvision_operators()
declare_torchvision_operators()
from transformers import AutoProcessor, Qwen3ForCausalLM
import torch, torchvision
assert torch.ops.torchvision.nms
"""


def test_models_and_processors_import_after_the_declaration():
    done = subprocess.run([sys.executable, "-P", "-c", MODEL], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_installation_changes_no_start_of_python():
    (packages,) = {Path(path) for path in sys.path if path.endswith("site-packages")}
    texts = {file.name: file.read_text() for file in packages.glob("*.pth")}
    assert not [name for name, text in texts.items() if "torch" in text]

"""Config models load without the libraries that they choose between."""

import pkgutil
import subprocess
import sys

import configs

FORBIDDEN = [
    "torch",
    "vllm",
    "transformers",
    "verifiers",
    "renderers",
    "prefect",
    "pyarrow",
    "polars",
    "deltalake",
    "numpy",
]


def loaded_by(code):
    """Return the top-level modules that are loaded after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    return set(done.stdout.split())


def test_configs_import_nothing_heavy():
    names = [f"configs.{module.name}" for module in pkgutil.iter_modules(configs.__path__)]
    assert "configs.load" in names
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    assert "pydantic" in loaded
    assert not loaded & set(FORBIDDEN)


def test_the_probe_sees_a_heavy_import():
    assert "numpy" in loaded_by("import numpy")

"""A late package is as any other to who imports it, and its own code runs once, when it is needed."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks.runtime.late_packages import import_late

ROOT = Path(__file__).parents[3]
INIT = """
import time, builtins
builtins.runs_of_slow += 1
time.sleep(0.2)
from . import sub
if hasattr(sub, 'nothing') or 'absent' in globals(): raise ImportError
from .types import Kind, Other
def double(number): return 2 * number
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The builtins, which count how often the package's own code ran."""
    import builtins

    package = tmp_path / "slow_package"
    (package / "types").mkdir(parents=True)
    (package / "__init__.py").write_text(INIT)
    (package / "sub.py").write_text("HERE = 1\n")
    (package / "types/__init__.py").write_text("from .kind import Kind\nOther = int\nimport slow_package\n")
    (package / "types/kind.py").write_text("class Kind: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, "runs_of_slow", 0, raising=False)
    yield builtins
    for name in [each for each in sys.modules if each.partition(".")[0] == "slow_package"]:
        del sys.modules[name]


def late() -> Any:
    import_late("slow_package", functions=["double"])
    import_late("slow_package.types", {"Kind": "slow_package.types.kind"})
    return import_module("slow_package")


def test_submodules_and_known_names_are_imported_without_it(slow: Any) -> None:
    package = late()
    assert import_module("slow_package.sub").HERE == 1
    assert import_module("slow_package.types").Kind is import_module("slow_package.types.kind").Kind
    double = package.double
    assert not hasattr(package, "__path_hooks__") and find_spec("slow_package") is package.__spec__
    assert slow.runs_of_slow == 0
    assert double(4) == 8 and slow.runs_of_slow == 1
    assert package.double.__module__ == "slow_package", "its own function now"


def test_what_is_not_known_runs_it_once_for_all_threads(slow: Any) -> None:
    package = late()
    with ThreadPoolExecutor(4) as pool:
        kinds = set(pool.map(lambda _: package.Other, range(4)))
    assert kinds == {int} and slow.runs_of_slow == 1
    with pytest.raises(AttributeError):
        package.missing  # noqa: B018
    import_late("slow_package")
    assert sys.modules["slow_package"] is package and slow.runs_of_slow == 1


def test_a_package_that_fails_says_so_each_time(slow: Any, tmp_path: Path) -> None:
    (tmp_path / "slow_package/__init__.py").write_text("raise RuntimeError('no')\n")
    package = late()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            package.Other  # noqa: B018


def test_one_that_is_not_installed_stays_absent() -> None:
    import_late("no_such_package")
    import_late("no_such_package.below", {"Kind": "no_such_package.below.kind"})
    with pytest.raises(ModuleNotFoundError):
        import_module("no_such_package")


def test_one_that_a_finder_refuses_is_left_to_whoever_imports_it(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        """Finds no package of that name, and says so."""

        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "slow_package":
                raise ImportError("not to be had here")

    monkeypatch.setattr(sys, "meta_path", [Refusing, *sys.meta_path])
    import_late("slow_package")
    assert "slow_package" not in sys.modules and slow.runs_of_slow == 0
    with pytest.raises(ImportError, match="not to be had here"):
        import_module("slow_package")


def lines_of(program: str) -> list[str]:
    """Return what a program prints in a fresh interpreter."""
    argv = [sys.executable, "-P", "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


VERIFIERS = r"""
import sys
import tasks.inference
import verifiers.v1 as vf
from verifiers.v1.dialects import AnthropicDialect
late = ("anthropic._client", "anthropic.types.beta", "math_verify.parser", "sympy")
assert not [name for name in late if name in sys.modules]
body = {"id": "m", "type": "message", "role": "assistant", "model": "x", "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": "hello"}],
        "usage": {"input_tokens": 3, "output_tokens": 2}}
dialect = AnthropicDialect()
print(dialect.parse_response(dialect.validate_response(body)).message.content)
print(vf.verify_boxed_math_answer(r"\boxed{\frac{1}{2}}", "0.5"), "sympy" in sys.modules)
import anthropic
from anthropic.types import Message, TextBlock
print(anthropic.Anthropic.__name__, anthropic.types.Message is Message, anthropic.__version__[0])
"""


@pytest.mark.engine
def test_verifiers_works_as_without() -> None:
    assert lines_of(VERIFIERS) == ["hello", "1.0 True", "Anthropic True 2", ""]


RENDERER = r"""
import sys
from tasks.inference.trace_rows.demonstrations import import_renderers
import_renderers()
from renderers import create_renderer, config_from_name, RendererConfig
import renderers.base
print("openai" in sys.modules)
from renderers import OverlongPromptError, Renderer
import renderers
print("openai" in sys.modules, renderers.create_renderer is create_renderer, Renderer is renderers.base.Renderer)
"""


@pytest.mark.engine
def test_who_renders_imports_no_client() -> None:
    assert lines_of(RENDERER) == ["False", "True True True", ""]

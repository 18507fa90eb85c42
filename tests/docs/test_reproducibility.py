"""The page of random draws names every function of the product that draws, and nothing that does not."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reproducibility.md"
PACKAGES = ("configs", "storage", "tasks", "flows")
DRAWS = re.compile(
    r"Random|SystemRandom|Generator|default_rng|manual_seed|seed_everything|randbits|(uniform|normal|bernoulli|random)_"
    r"|rand|randn|randint|randperm|rand_like|randn_like|multinomial|shuffle|uniform|choice|permutation|blake2b"
)
"""Names of functions that draw, or make a seed."""
HASHES = {"digest"}
"""The hash that seeds are made by; other functions of that name are imported from elsewhere."""
NO_DRAWS = {("tasks/arrays/permutation.py", "digest")}
"""The hash itself, whose callers are listed."""


def drawing_functions():
    """File and name of each function of the product that draws or makes a seed."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            hashes = "from tasks.arrays.permutation import" in text
            for function in outermost(ast.parse(text)):
                if any(isinstance(node, ast.Call) and draws(node, hashes) for node in ast.walk(function)):
                    yield file.relative_to(ROOT).as_posix(), function.name


def outermost(node):
    """The functions of a module and of its classes, without those within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outermost(child)


def draws(call, hashes):
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return bool(DRAWS.fullmatch(name)) or (hashes and name in HASHES and isinstance(call.func, ast.Name))


def test_every_function_that_draws_is_on_the_page():
    found = set(drawing_functions())
    listed = set(re.findall(r"\| `([\w/.]+)` `(\w+)` \|", PAGE.read_text(encoding="utf-8")))
    assert len(listed) > 15
    assert found - listed - NO_DRAWS == set(), "draws that the page does not name"
    defined = {
        (path, node.name)
        for path in {path for path, _ in listed}
        for node in outermost(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    }
    assert listed - defined == set(), "functions on the page that the code does not have"

"""The page on security: every claim names a test that is there, and no code of ours makes code of data."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs/security.md").read_text(encoding="utf-8").splitlines()
CLAIMS = [line for line in LINES if "`tests/" in line]
PRODUCT = [path for folder in ("configs", "storage", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")]
MENTIONED = re.compile(r"`(tests/[\w/.]+)::(\w+)`")
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "torch.load", "os.system", "os.popen"}


@pytest.mark.parametrize("line", CLAIMS, ids=lambda line: line.split("|")[1].strip()[:60])
def test_a_claim_is_held_by_a_test(line):
    named = MENTIONED.findall(line)
    assert named and len(re.findall("`tests/", line)) == len(named)
    for path, name in named:
        nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_table_of_claims_is_read():
    assert len(CLAIMS) > 30
    tables = [number for number, line in enumerate(LINES) if line == "| claim | test |"]
    for start in tables:
        rows = [line for line in LINES[start + 2 : LINES.index("", start)] if line.startswith("|")]
        assert rows and all(row in CLAIMS for row in rows)


def calls(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_becomes_code(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported = {alias.name for alias in aliases if (alias.name, alias.asname) != ("pickle", None)}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in imported} & MODULES
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Handles of GPU memory go to vLLM in this form; nothing is read in it.
    assert {name for name in attributes if name.startswith("pickle.")} <= {"pickle.dumps"}
    for name, call in calls(path):
        given = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert name not in CALLS, name
        assert given.get("allow_pickle", "False") == "False" and given.get("shell", "False") == "False", name
        assert given.get("trust_remote_code", "False") == "False", name
        if name.endswith("AutoModelForCausalLM.from_pretrained"):
            assert (given["trust_remote_code"], given["use_safetensors"]) == ("False", "True")

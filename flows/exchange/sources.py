"""read_keys: what a trainer was given, by key: of a config file, of calls in Python, or of a launch line.

Nothing is run. Python is read as a syntax tree, in notebooks and Markdown too, and of a shell script only variables and
arrays with a plain value are filled in.
"""

import ast
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from operator import add, mul, sub, truediv
from textwrap import dedent
from typing import Any

import yaml

EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
FENCE = re.compile(r"^[ \t]*```[ \t]*py(?:thon)?\d?\b[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
MAGIC = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)
"""A line of a notebook that is no Python."""
TAIL = re.compile(r"(?:^|(?<=\s))(?:#|\d?>|[|;&]).*$", re.MULTILINE)
"""A comment, a redirection, or the next command of a line."""
ASSIGNMENT = re.compile(
    r"^([ \t]*)(?:export[ \t]+)?(\w+)=(\((?:[^\n]*|.*?\n[ \t]*)\)[ \t]*$|[^\n]*)", re.DOTALL | re.MULTILINE
)
VARIABLE = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?|\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
MAX_DEPTH = 5
"""Variables inside the values of variables that are filled in."""
MAX_VALUE = 10_000
"""Characters of a value from which on a variable is not filled in: values that name each other grow without bound."""
OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


class Unresolved(str):
    """The text of an expression or a variable whose value only running it would tell."""


def read_keys(
    suffix: str, text: str, calls: Mapping[str, Mapping[str, str]], launches: Sequence[str]
) -> dict[str, Any]:
    """Return values by dotted key of a file with this suffix, of which those that are not plain are Unresolved.

    `calls` has keys by function and argument; first comes a config's class, whose arguments are keys themselves.
    `launches` are patterns of what starts a trainer. Raises ValueError, RecursionError or YAMLError where the file
    cannot be read.
    """
    tree: Any = {}
    if suffix in (".toml", ".json"):
        tree = tomllib.loads(text) if suffix == ".toml" else json.loads(text if text.strip() else "{}")
    elif suffix in (".py", ".ipynb", ".md"):
        tree = _call_keys(_python(suffix, text), calls) or _launch_keys(text, launches)
    elif suffix in (".sh", ".bash", ".sbatch", ".slurm"):
        tree = _launch_keys(text, launches)
    else:
        tree = yaml.safe_load(text) or {}
        if isinstance(tree, dict):
            tree = {name: _number(value) for name, value in _flatten(tree)}
    if not isinstance(tree, dict) or not tree:
        raise ValueError("it has no keys with values" if tree else "the file is empty, or has no such call or command")
    return dict(_flatten(tree))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key; environments, a list of tables, are numbered."""
    for name, value in tree.items():
        if name in ("source", "env") and isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> Any:
    """Return a text such as 1e-6, which YAML 1.1 takes for text, as the number that it is."""
    return float(value) if EXPONENT.fullmatch(str(value)) else value


def _python(suffix: str, text: str) -> list[ast.AST]:
    """Return the nodes of a script, of the cells of a notebook or of the blocks of a page, but of those in error."""
    blocks, nodes = FENCE.findall(text) if suffix == ".md" else [text], list[ast.AST]()
    if suffix == ".ipynb":
        blocks = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    for block in blocks:
        with suppress(SyntaxError):
            nodes += ast.walk(ast.parse(dedent(MAGIC.sub("", block))))
    return nodes


def _call_keys(nodes: Sequence[ast.AST], calls: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the arguments of the only call of a config, and of the first call of each other function."""
    first, keys, config = dict[str, ast.Call](), dict[str, Any](), next(iter(calls))
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name == config in first:
            raise ValueError(f"it calls {config} more than once; give a file with one of the calls")
        first.setdefault(name, call)
    constants = _constants(nodes)
    for name in filter(first.get, calls if config in first else ()):
        words = [(word.arg or "**", word.value) for word in first[name].keywords]
        for argument, node in [*enumerate(first[name].args), *words]:
            key = argument if name == config else calls[name].get(str(argument))
            keys |= {str(key): evaluate(ast.unparse(node), constants)} if key is not None and key not in keys else {}
    return keys


def _constants(nodes: Sequence[ast.AST]) -> dict[str, Any]:
    """Return the values of names that are bound once, to a literal."""
    stores = [ast.unparse(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    bound = Counter([*stores, *(node.arg for node in nodes if isinstance(node, ast.arg))])
    assigned = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    for names, value in assigned:  # which grows meanwhile
        if isinstance(names, ast.Tuple) and isinstance(value, ast.Tuple):
            assigned += zip(names.elts, value.elts, strict=False)
    values = {ast.unparse(name): evaluate(ast.unparse(value), {}) for name, value in assigned}
    return {name: value for name, value in values.items() if bound[name] == 1}


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a literal, or of dotted names and numbers with + - * / between them; else Unresolved."""
    with suppress(SyntaxError, ValueError, TypeError, LookupError, ArithmeticError):
        value = _value(ast.parse(expression.strip(), mode="eval").body, values)
        return json.loads(json.dumps(value, allow_nan=False))
    return Unresolved(expression)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name | ast.Attribute):
        return values[ast.unparse(node)]
    if isinstance(node, ast.Subscript):
        return _value(node.value, values)[ast.literal_eval(node.slice)]
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    value = OPERATORS[type(node.op)](*(Fraction(str(_value(side, values))) for side in (node.left, node.right)))
    return int(value) if value.denominator == 1 else float(value)


def _launch_keys(text: str, launches: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the command that starts a trainer: `--key value ...`, or `key=value`."""
    text = TAIL.sub("", text).replace("\\\n", " ")
    start = next(filter(None, (re.search(launch, text) for launch in launches)), None)
    keys, words = dict[str, list[str]](), list[str]()
    if start:
        command = _substitute(text[start.end() :].partition("\n")[0], _variables(text))
        for word in shlex.split(command + '"' * (command.count('"') % 2)):  # it may end inside of a text
            name, sign, value = word.lstrip("+~-").partition("=")
            if sign or word.startswith("--"):
                words = []
                keys[name] = [value] if sign else words
            else:
                words.append(word.rstrip(","))
    return {name: _plain(words) for name, words in keys.items()}


def _plain(words: Sequence[str]) -> Any:
    """Return an argument's value: true without words, what YAML makes of one word, a list of several, or its item."""
    values: list[Any] = []
    for word in words:
        try:
            values.append(Unresolved(word) if "$" in word else _number(yaml.safe_load(word)))
        except yaml.YAMLError:
            values.append(word)
    only = values[0] if len(values) == 1 else values or True
    return only[0] if isinstance(only, list) and len(only) == 1 else only


def _variables(text: str) -> dict[str, str]:
    """Return the values of variables and arrays, as text; of one that is set under a condition, none."""
    variables = {"HOME": "~"}
    for indent, name, assigned in ASSIGNMENT.findall(text):
        value = _substitute(assigned, variables)
        variables.pop(name, None)
        if not indent and "$(" not in value and len(value) < MAX_VALUE:
            value = " ".join(value.split())
            variables[name] = value[1:-1] if value.startswith("(") else value.strip("\"'")
    return variables


def _substitute(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        array, name, default, plain = match.groups()
        return variables.get(array or name or plain, match[0] if default is None else default.replace('"', ""))

    def result(match: re.Match[str]) -> str:
        number = evaluate(match[1], variables)
        return match[0] if isinstance(number, Unresolved) else str(number)

    for _ in range(MAX_DEPTH):
        text = VARIABLE.sub(value, text)
    return ARITHMETIC.sub(result, text)

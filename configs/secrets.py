"""What looks like a secret: names of settings and of environment variables, values, and addresses with a password.

What is in a config is kept in the ledger, in the table of runs and in keys, and is shown: secrets do not belong there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = re.compile(
    r"(KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK)S?(_|$)|TOKEN(_|$)|AUTH(ORIZATION|_STRING)?$"
)
"""What a word of the name of a secret ends with, as in OPENAI_API_KEY; tokenizers and counts of tokens are none."""
CERTAIN = re.compile(
    r"API_?KEY|(ACCESS|PRIVATE|SECRET)_KEY|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|AUTH(ORIZATION|_STRING)?$"
    r"|(ACCESS|AUTH|API|BEARER|REFRESH|SESSION|HF|HUB|GITHUB)_TOKEN"
)
"""Names that are those of nothing else."""
HARMLESS = re.compile(
    r"(ANSWER|QUESTION|PROMPT|LABEL|COLUMN|ROW|ID|TEXT|TARGET|INPUT|OUTPUT|SOLUTION|DATASET|DATA|SORT|GROUP|FIELD|INFO"
    r"|EOS|BOS|PAD|UNK|MASK|SEP|CLS|STOP|THINK|SPECIAL|START|END|IMAGE)_(KEY|TOKEN)S?$"
)
"""Names of columns of data sets, and of words of a vocabulary."""
REFERENCE = re.compile(r"_(VARIABLE|VAR|ENV|ENV_VAR|FILE|PATH)S?$")
"""Names of settings that say where a secret is, and hold none."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KNOWN = re.compile(
    r"\b(sk-(?=[\w-]*[0-9])[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|xox[abprs]-[\w-]{10,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.eyJ[\w-]+|hooks\.slack\.com/\w+/\w+)"
)
"""Values that services hand out, by how they begin."""
PASSWORD = re.compile(r"://[^/\s:@?#]*:[^/\s@?#]+@")
ADDRESS = re.compile(rf"https?://[^/\s?#]*@|{PASSWORD.pattern}")
"""An address with a password before the host, or of the web with anything there: keys are written as names of users."""


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or a setting is named as a secret is."""
    return NAMES.search(name.upper().replace("-", "_")) is not None


def holds_password(value: str) -> bool:
    """Tell whether a text is an address with a password in it."""
    return PASSWORD.search(value) is not None


def looks_random(value: str) -> bool:
    """Tell whether a text is more likely a secret than a word: long, or short with letters and digits in it."""
    both = re.search("[A-Za-z]", value) and re.search("[0-9]", value)
    return not re.search(r"\s", value) and (len(value) >= 16 or bool(len(value) >= 6 and both))


def texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of plain values with its dotted key."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield from texts(inside, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from texts(inside, f"{where}.{index}")


def secrets_in(tree: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> tuple[list[str], list[str]]:
    """Return one line for each text of a config that is a secret, and one for each that may be one.

    What is in `recorded`, the config of a run that is there already, is kept in the store anyway, and is not reported.
    """
    known = set(texts(recorded or {}))
    certain: list[str] = []
    possible: list[str] = []
    for where, value in texts(tree):
        if value and (where, value) not in known:
            sure, line = _judge(where, value)
            if line:
                (certain if sure else possible).append(f"{where}: {line}")
    return certain, possible


FREE = {"taskset", "env", "harness", "runtime", "settings", "renderer_settings", "arguments", "extra_body", "sampling"}
"""Sections whose names are not ours: in all others a setting called `key` is what we say that it is."""
KEPT = "what a config holds is kept in the ledger, the runs and in keys, and is shown"


def _judge(where: str, value: str) -> tuple[bool, str]:
    """Return whether a text is a secret beyond doubt, and what to say of it; nothing where it is none."""
    name = next((each for each in reversed(where.split(".")) if not each.isdigit()), "").upper().replace("-", "_")
    if ADDRESS.search(value):
        key = "engine.api_key_variable" if where.startswith("engine") else "a setting such as `api_key_variable`"
        return True, (
            f"the address holds a user name or a password, and {KEPT}. Leave it out, put the key into an environment "
            f"variable and name that in {key}"
        )
    if KNOWN.search(value):
        return True, f"this is a key of a service, and {KEPT}. {_advice(where, name)}"
    option = value.split("=")[0]
    if where.startswith("engine.extra_arguments") and option.startswith("--") and is_secret_name(option):
        return True, (
            f"{option}: everybody on the machine can read a command line, and {KEPT}. The engine takes its key from "
            "the environment variable that engine.api_key_variable names"
        )
    if REFERENCE.search(name) or (name == "VARIABLE" and where.startswith("alerts.")):
        wrong = name.endswith(("VARIABLE", "_VAR")) and VARIABLE.fullmatch(value) is None
        return True, "name an environment variable (letters, digits and _), not what is in it" if wrong else ""
    if FREE.isdisjoint(where.split(".")[:-1]) or not is_secret_name(name) or HARMLESS.search(name):
        return True, ""
    if CERTAIN.search(name) or looks_random(value):
        return True, f"by its name this is a secret, and {KEPT}. {_advice(where, name)}"
    return False, f"if this is a secret: {KEPT}. {_advice(where, name)}"


def _advice(where: str, name: str) -> str:
    variable = name if VARIABLE.fullmatch(name) else "MY_KEY"
    way, parts = f"Put it into an environment variable, say {variable}, and have the code read that", where.split(".")
    return f'{way}; name it in {parts[0]}.{parts[1]}.variables=["{variable}"]' if parts[0] == "environments" else way

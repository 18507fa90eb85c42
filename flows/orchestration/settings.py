"""Which Prefect API a run reports to, found without importing Prefect: its settings are read when it is imported."""

import os
import tomllib
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

URL = "PREFECT_API_URL"
POOL = "stagecoach"
"""The work pool of runs in the file of deployments that comes with the program; `deploy --pool` names another one."""


class DeployRefused(ValueError):
    """Nothing was deployed, for a reason that the message names."""


class SettingsUnreadable(ValueError):
    """A file that Prefect takes its settings from cannot be read."""


def configured_url() -> str:
    """Return the API URL that the user has configured, or an empty string.

    The order is Prefect's own: environment, `.env`, `prefect.toml`, `[tool.prefect]` of `pyproject.toml`, profile.
    Importing Prefect to ask would settle its API for the process.
    """
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    active = os.environ.get("PREFECT_PROFILE") or _setting(profiles, "active")
    return str(
        os.environ.get(URL)
        or dotenv_values(".env").get(URL)
        or _setting(Path("prefect.toml"), "api", "url")
        or _setting(Path("pyproject.toml"), "tool", "prefect", "api", "url")
        or _setting(profiles, "profiles", active, URL)
    )


def required_url(outcome: str) -> str:
    """Return the configured API URL. Raises DeployRefused with the `outcome` where none is configured."""
    if url := configured_url():
        return url
    raise DeployRefused(
        f"no Prefect server is configured, {outcome}. Start one (prefect server start) and say where it is: "
        "export PREFECT_API_URL=http://127.0.0.1:4200/api"
    )


def embedded_settings(home: Path, url: str) -> dict[str, str]:
    """Return the environment of a flow and its embedded server: all state below `home`, nothing sent elsewhere."""
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),  # by default outside PREFECT_HOME, like the next
        "PREFECT_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        **_variables("embedded.env"),
        **({URL: url} if url else {}),
    }


def server_settings() -> dict[str, str]:
    """Return the environment of the embedded server alone: the services that it leaves out, and how it writes."""
    return _variables("server.env")


def _variables(file: str) -> dict[str, str]:
    return {name: value or "" for name, value in dotenv_values(Path(__file__).with_name(file)).items()}


def _setting(path: Path, *keys: str) -> Any:
    """Return a value of a TOML file; empty where there is none. A broken file is the user's to know of."""
    try:
        value: Any = tomllib.loads(path.read_text())
        for key in keys:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        return value or ""
    except FileNotFoundError:
        return ""
    except tomllib.TOMLDecodeError as problem:
        raise SettingsUnreadable(f"{path.absolute()} is not valid TOML: {problem}. Correct or remove it") from problem

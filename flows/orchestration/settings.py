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
    # Nothing of a run leaves the machine unasked, and no second server starts beside ours.
    off = (
        "PREFECT_SERVER_ANALYTICS_ENABLED",
        "PREFECT_UI_SHOW_PROMOTIONAL_CONTENT",
        "PREFECT_SERVER_EPHEMERAL_ENABLED",
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT",  # the ledger remembers; two memories would drift
    )
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),  # by default outside PREFECT_HOME, like the next
        "PREFECT_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "DO_NOT_TRACK": "1",
        **dict.fromkeys(off, "false"),
        **({URL: url} if url else {}),
    }


def server_settings() -> dict[str, str]:
    """Return what the embedded server leaves out: services for schedules, workers, leases and automations.

    The recorder of task runs and the persister of events stay: without them a run has no task runs. They write what
    comes within a second, or a few, at once: a transaction for each of a stage's states takes longer than most stages.
    """
    unused = (
        "SCHEDULER",
        "LATE_RUNS",
        "FOREMAN",
        "TRIGGERS",
        "PAUSE_EXPIRATIONS",
        "CANCELLATION_CLEANUP",
        "REPOSSESSOR",
        "CLEANUP_RECONCILER",
    )
    return {
        **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in unused},
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
        "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }


def _setting(path: Path, *keys: str) -> Any:
    """Return a value of a TOML file; empty where there is none. A broken file is the user's to know of."""
    try:
        value: Any = tomllib.loads(path.read_text())
        for key in keys:
            value = value.get(key, {})
        return value or ""
    except FileNotFoundError:
        return ""
    except tomllib.TOMLDecodeError as problem:
        raise SettingsUnreadable(f"{path.absolute()} is not valid TOML: {problem}. Correct or remove it") from problem
    except (AttributeError, TypeError) as problem:  # of a value in place of a table, or the reverse
        raise SettingsUnreadable(f"{path.absolute()}: {'.'.join(keys)} must be in tables. Correct it") from problem

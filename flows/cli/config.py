"""Settings: what each means, its value in a config, and where that came from."""

import json
from collections.abc import Sequence
from pathlib import Path

from configs.layers import presets
from configs.load import Setting, nearest_key, settings
from flows.cli.arguments import UsageError
from flows.reporting.formats import config_value, console, grid


def main(items: Sequence[str], overrides: Sequence[str] = (), as_json: bool = False) -> int:
    """Print the settings of a config, those of some keys or sections alone where any are named; return 0.

    `items` are presets, TOML files and keys. Raises UsageError for a key that there is not, ConfigError for a config
    that cannot be read.
    """
    files = [each for each in items if each in presets() or each.endswith(".toml") or Path(each).is_file()]
    keys = [each for each in items if each not in files]
    every = settings(files, overrides)
    found = [each for each in every if not keys or any(_belongs(each, key) for key in keys)]
    for key in keys:
        if not any(_belongs(each, key) for each in every):
            near = nearest_key(key)
            raise UsageError(f"there is no setting {key!r}" + (f"; did you mean {near}?" if near else ""))
    if as_json:
        print(json.dumps([vars(each) for each in found], default=str))
    elif len(found) == 1:
        print("\n".join(_whole(found[0])))
    else:
        rows = [(each.key, config_value(each.value), each.source or "default") for each in found]
        console().print(grid(("setting", "value", "from"), rows, left=(0, 1, 2)))
    return 0


def _belongs(setting: Setting, key: str) -> bool:
    return setting.key == key or setting.key.startswith(f"{key}.")


def _whole(setting: Setting) -> list[str]:
    origin = f"from {setting.source}; the default is {config_value(setting.default)}" if setting.source else "default"
    return [f"{setting.key} = {config_value(setting.value)}    ({origin})", *setting.meaning.splitlines()]

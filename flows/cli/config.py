"""The command config: the meaning of settings, their values in a config, and where the values came from."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flows.cli.arguments import Json, UsageError, option, split_items
from flows.reporting.formats import config_value, console, visible

if TYPE_CHECKING:
    from configs.load import Setting


def config(
    *items: Annotated[
        str, option("a KEY (a setting or a section), FILES and OVERRIDES; see below", "[KEY] [FILES] [OVERRIDES]")
    ],
    as_json: Json = False,
) -> int:
    """Print the settings of a config, only those of the named keys and sections if any are named.

    Raises UsageError for an unknown key, ConfigError for a config that cannot be read.
    """
    from configs.layers import presets
    from configs.load import nearest_key, settings

    names, overrides = split_items(items)
    files = [name for name in names if name in presets() or name.endswith(".toml") or Path(name).is_file()]
    keys = [name for name in names if name not in files]
    table = settings(files, overrides)
    selected = [setting for setting in table if not keys or any(_belongs(setting, key) for key in keys)]
    for key in keys:
        if not any(_belongs(setting, key) for setting in table):
            near = nearest_key(key)
            raise UsageError(f"there is no setting {key!r}" + (f"; did you mean {near}?" if near else ""))
    if as_json:
        print(json.dumps([vars(setting) for setting in selected], default=str))
        return 0
    for setting in selected:
        value, default = config_value(setting.value), config_value(setting.default)
        line = f"{setting.key} = {value}    (from {setting.source or 'default'}; the default is {default})"
        console().print(visible(line))
        if keys:
            console().print(setting.meaning)
    return 0


def _belongs(setting: "Setting", key: str) -> bool:
    return setting.key == key or setting.key.startswith(f"{key}.")

"""The command check: the plan of a run from its config, before anything is opened or started."""

from typing import Annotated

from flows.cli.arguments import Items, Name, StoreOption, option, split_items
from flows.reporting.formats import say

NOT_LOADED = (
    "not checked: that each environment imports, its settings, seats, examples and rewards, and how long its prompts "
    "are; `stagecoach check --load` asks it"
)


def check(
    *items: Items,
    name: Name = "",
    store: StoreOption = "",
    load: Annotated[bool, option("load each environment too, and check what it says of itself")] = False,
    show_prompt: Annotated[
        bool, option("load each environment, and print its first prompts as the model will see them")
    ] = False,
    gpu: Annotated[
        str, option("plan the memory of this GPU, such as H200 or 80GiB; this machine need not have it")
    ] = "",
    as_json: Annotated[bool, option("print the resolved config as JSON instead", name="--json")] = False,
) -> int:
    """Resolve and validate a config and print the plan. Raises ConfigError if it cannot run here, or on the GPU.

    With `load` or `show_prompt`, each environment is loaded in a separate process. A GPU is `gpu`, else one that is
    here, else the one that the config names.
    """
    from configs.load import dump
    from configs.load import load as load_config
    from flows.cli import plan
    from flows.runtime.resolve_run import assignments
    from flows.services.memory import require_memory

    files, overrides = split_items(items)
    options = {key: value for key, value in (("name", name), ("store", store)) if value}
    config = load_config(files, [*overrides, *assignments(options)])
    elsewhere = "" if gpu else plan.gpu_elsewhere(config)
    resolved, memory = plan.resolve_here(config, gpu or elsewhere)
    if as_json:
        print(dump(resolved))
        return 0
    for line in plan.lines(config, resolved, memory):
        say(line)
    if elsewhere:
        say(f"no NVIDIA GPU is here, where a run is refused: planned for {elsewhere} (placement.gpu)")
    if memory:
        require_memory(memory)
    for line in plan.environment_lines(resolved, show_prompt) if load or show_prompt else (NOT_LOADED,):
        say(line)
    return 0

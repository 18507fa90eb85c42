"""The tokenizer of a run, found where it lies and only read: in a policy of the run, or beside the model it began with.

In an object store the one file is read, not the weights; nothing is written anywhere.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

from configs.run import RunConfig
from storage.store import Store
from tasks.inference.token_texts import TokenTexts

FILE = "tokenizer.json"
KEPT = 8
"""Opened tokenizers that are held in memory; those of a run's policies are one, as their files are the same."""
_opened: OrderedDict[str, TokenTexts] = OrderedDict()
_lock = Lock()


class TokenizerUnreadable(ValueError):
    """A tokenizer's file is there and cannot be used."""


def tokenizer_of(store: Store, config: RunConfig, policy_key: str, others: Iterable[str] = ()) -> TokenTexts | None:
    """Return the tokenizer of what a policy of a run sampled; None where it is nowhere to be found.

    `policy_key` is the trace's; an empty one is another model's, whose tokenizer is not known. `others` are further
    policies of the run, which have the same tokenizer, for a policy whose weights were removed; they are asked in turn.
    Raises TokenizerUnreadable for a damaged file, StoreUnavailable where the store does not answer.
    """
    if not policy_key:
        return None
    named = _in_directory(config.model.tokenizer)
    if named is not None:
        return named
    for key in dict.fromkeys((policy_key, *others)):
        found = _in_policy(store, key)
        if found is not None:
            return found
    return _in_directory(config.model.path)


def open_tokenizer(directory: str | Path) -> TokenTexts:
    """Open the tokenizer of a directory. Raises TokenizerUnreadable where there is none, or no usable one."""
    path = Path(directory).expanduser() / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerUnreadable(f"{path} cannot be read: {error.strerror}. Token ids can be looked at") from error
    return _once(hashlib.sha256(data).hexdigest(), lambda: data, str(path))


def _in_directory(place: str) -> TokenTexts | None:
    """Return the tokenizer of a local directory; None for no name, a name on a hub, or a directory without the file."""
    if not place or not (Path(place).expanduser() / FILE).is_file():
        return None
    return open_tokenizer(place)


def _in_policy(store: Store, key: str) -> TokenTexts | None:
    """Return the tokenizer of a policy; None where the policy or its tokenizer is gone."""
    if not key.replace("-", "").replace("_", "").isalnum():
        return None  # no key of ours: whoever made the trace wrote it
    try:
        policy = store.policies.find(key)
    except (json.JSONDecodeError, KeyError, TypeError):
        return None  # its manifest is damaged, and says nothing of a tokenizer; `stagecoach repair` tells of it
    file = next((each for each in policy.files if each.path == FILE), None) if policy else None
    if policy is None or file is None:
        return None
    place = policy.place_of(file)
    try:
        return _once(file.sha256, lambda: store.root.read(place), store.root.child(place))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerUnreadable(f"{place} cannot be read: {error}. Token ids can be looked at") from error


def _once(digest: str, read: Callable[[], bytes], where: str) -> TokenTexts:
    """Return the tokenizer of a digest; it is read and made where it is not held in memory."""
    with _lock:
        if digest not in _opened:
            _opened[digest] = _made(read(), where)
        _opened.move_to_end(digest)
        while len(_opened) > KEPT:
            _opened.popitem(last=False)
        return _opened[digest]


def _made(data: bytes, where: str) -> TokenTexts:
    from tokenizers import Tokenizer

    try:
        return TokenTexts(Tokenizer.from_buffer(data))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerUnreadable(
            f"{where} is no tokenizer that can be opened: {error}. Everything else can be looked at, tokens by their "
            "ids; put the file back from a copy"
        ) from error

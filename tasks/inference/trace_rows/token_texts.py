"""The text that each token adds, by the tokenizer of a run, which is found without loading a model."""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from storage.errors import DamagedSlice
from storage.store import Store

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.run import RunConfig


FILE = "tokenizer.json"
MAX_TOKEN_ID = 2**32 - 1
"""The largest token id that the tokenizers library accepts."""


class TokenText(NamedTuple):
    """What one token adds to the decoded text."""

    text: str
    """The characters that end in this token; ⟨id 12345⟩ where it completes none, or the vocabulary lacks it."""
    special: bool
    """Whether it is a special token of the tokenizer and not a piece of text."""


class TokenTexts:
    """The texts of a tokenizer's tokens: `TokenTexts(tokenizer).of(ids)`. Safe to share between threads."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {number for number, token in added if token.special}

    def of(self, ids: Iterable[int]) -> list[TokenText]:
        """Return what each token adds to the text, one for each id, ids that the tokenizer lacks included."""
        from tokenizers.decoders import DecodeStream

        stream, texts = DecodeStream(skip_special_tokens=False), list[TokenText]()
        for number in map(int, ids):
            text = None
            if 0 <= number <= MAX_TOKEN_ID:
                try:
                    text = stream.step(self._tokenizer, number)
                except Exception:  # without a class of its own: the bytes before were those of no character
                    stream = DecodeStream(skip_special_tokens=False)
                    text = stream.step(self._tokenizer, number)
            texts.append(TokenText(f"⟨id {number}⟩" if text is None else text, number in self._special))
        return texts


_cache: dict[str, TokenTexts] = {}
"""By digest of the tokenizer's file: the policies of a run share one."""


class TokenizerUnreadable(ValueError):
    """A tokenizer's file exists and cannot be used."""


def tokenizer_of(store: Store, config: "RunConfig", policy_key: str, others: Iterable[str] = ()) -> TokenTexts | None:
    """Return the tokenizer of the tokens that a policy of a run sampled; None where none is found.

    `policy_key` is the trace's; an empty one means another model, whose tokenizer is unknown. `others` are further
    policies of the run, which have the same tokenizer: they are tried in turn where the policy's weights were removed.
    Raises TokenizerUnreadable for a damaged file, StoreUnavailable where the store does not answer.
    """
    if not policy_key:
        return None
    texts = _in_directory(config.model.tokenizer)
    for key in dict.fromkeys((policy_key, *others)):
        texts = texts or _in_policy(store, key)
    return texts or _in_directory(config.model.path)


def _in_directory(directory: str) -> TokenTexts | None:
    """Return the tokenizer of a local directory; None for no name, a name on a hub, or a directory without the file."""
    path = Path(directory).expanduser() / FILE
    return _open(path.read_bytes, str(path)) if directory else None


def _in_policy(store: Store, key: str) -> TokenTexts | None:
    """Return the tokenizer of a policy; None where the policy or its tokenizer is gone."""
    if not key.replace("-", "").replace("_", "").isalnum():
        return None  # no key of a store: it was imported with the trace
    try:
        policy = store.policies.find(key)
    except DamagedSlice:
        return None  # a damaged manifest names no tokenizer; `stagecoach repair` reports it
    file = next((each for each in policy.files if each.path == FILE), None) if policy else None
    if policy is None or file is None:
        return None
    read, place = partial(store.policies.read_file, policy, file), store.root.child(policy.place_of(file))
    return _open(read, place, file.sha256)


def _open(read: Callable[[], bytes], place: str, digest: str = "") -> TokenTexts | None:
    """Return the tokenizer of a file, read once for each digest; None where it is gone."""
    from tokenizers import Tokenizer

    if digest in _cache:
        return _cache[digest]
    try:
        data = read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerUnreadable(f"{place} cannot be read: {error}. Token ids can be looked at") from error
    try:
        texts = TokenTexts(Tokenizer.from_buffer(data))
    except Exception as error:  # the library raises no narrower class
        raise TokenizerUnreadable(
            f"{place} is no tokenizer that can be opened: {error}. Everything else can be looked at, tokens by their "
            "ids; put the file back from a copy"
        ) from error
    return _cache.setdefault(digest or hashlib.sha256(data).hexdigest(), texts)

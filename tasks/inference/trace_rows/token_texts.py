"""The text that each token adds, by the tokenizer of a run, which is found without loading a model."""

import codecs
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from storage.errors import DamagedSlice
from storage.store import Store

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.run import RunConfig


FILE = "tokenizer.json"
MAX_CACHED = 8
"""Tokenizers in memory at once. The policies of a run share one, because their files have the same digest."""
MAX_TOKEN_ID = 2**32 - 1
"""The largest token id that the tokenizers library accepts."""
ANCHOR = "a"
"""A token that decodes to itself under every decoder: a token decoded between two of them shows what it adds."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_ESCAPED = re.compile("[\udc80-\udcff]+")
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = iter(range(0x100, 0x200))
BYTE_OF_CHARACTER = {chr(byte if byte in _PRINTABLE else next(_HIDDEN)): byte for byte in range(256)}
"""The 256 characters that byte-level tokenizers write for bytes, as GPT-2 did first."""


class TokenText(NamedTuple):
    """What one token adds to the decoded text."""

    text: str
    """The characters that end in this token; the texts of all tokens concatenate to the decoded text."""
    shown: str
    """The same for display, with the bytes of incomplete or invalid characters: ⟨E2 82⟩, ⟨id 12345⟩."""
    special: bool
    """Whether it is a special token of the tokenizer and not a piece of text."""

    @property
    def whole(self) -> bool:
        """Whether the token ends with a complete character, and holds no invalid bytes."""
        return self.text == self.shown


class _Token(NamedTuple):
    spelling: str
    """In the vocabulary."""
    data: bytes | None
    """Its bytes; None for a token that always stands for the same text."""
    special: bool


class TokenTexts:
    """The texts of a tokenizer's tokens: `TokenTexts(tokenizer).of(ids)`. Safe to share between threads."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._decoder: Any = tokenizer.decoder
        kinds = _component_types(self._decoder or tokenizer.pre_tokenizer)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        # What follows a token in the middle of a text: what the decoder puts between two tokens, and `ANCHOR`.
        self._around = self._decode([ANCHOR, ANCHOR])[len(ANCHOR) :]
        self._token_of, self._text_of = cache(self._look_up), cache(self._between)

    def of(self, ids: Iterable[int], begins: bool = True) -> list[TokenText]:
        """Return what each token adds to the text, one for each id, ids that the tokenizer lacks included.

        `begins` says that the first id is the first of its text: some decoders drop a space there.
        """
        numbers, pending = list(ids), b""
        tokens = [self._token_of(number) for number in numbers]
        present = [index for index, token in enumerate(tokens) if token]
        result = list[TokenText]()
        for index, token in enumerate(tokens):
            if token is None:
                result.append(TokenText("", f"⟨id {numbers[index]}⟩", False))
            elif token.data is None:
                # Some decoders drop a space at the ends of a text.
                text = self._text_of(token.spelling, begins and index == present[0], index == present[-1])
                result.append(TokenText(text, text, token.special))
                pending = b""
            else:
                text_of_bytes, pending = _decode_bytes(pending, token.data, token.special)
                result.append(text_of_bytes)
        return result

    def _look_up(self, number: int) -> _Token | None:
        """Return the token of an id; None where the vocabulary lacks it."""
        # The library raises OverflowError for ids outside of its range, which an environment may well send.
        token = self._tokenizer.id_to_token(int(number)) if 0 <= number <= MAX_TOKEN_ID else None
        if token is None:
            return None
        special = number in self._added and bool(self._added[number].special)
        return _Token(token, self._bytes_of(number, token), special)

    def _bytes_of(self, number: int, token: str) -> bytes | None:
        """Return the bytes that a token stands for; None where the decoder makes text of it."""
        if self._byte_level:
            # Added tokens are spelled as they are, and not in the 256 characters for bytes.
            if number in self._added or not all(each in BYTE_OF_CHARACTER for each in token):
                return token.encode()
            return bytes(BYTE_OF_CHARACTER[each] for each in token)
        match = _BYTE.fullmatch(token) if self._byte_fallback else None
        return bytes([int(match[1], 16)]) if match else None

    def _between(self, token: str, first: bool, last: bool) -> str:
        """Return what a token adds between two others, or at an end of a text."""
        before, after = [] if first else [ANCHOR], [] if last else [ANCHOR]
        whole = self._decode([*before, token, *after])
        return whole[len(ANCHOR) * len(before) :].removesuffix("" if last else self._around)

    def _decode(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(tokens))


@lru_cache(1 << 16)
def _decode_bytes(pending: bytes, data: bytes, special: bool) -> tuple[TokenText, bytes]:
    """Return what `data` adds to the text after the `pending` bytes, and the bytes that are pending then.

    Pending are the first bytes of a character whose last byte is not there yet.
    """
    # A new decoder for each token: its state are the pending bytes, which the caller passes from token to token.
    reader = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    out = reader.decode(pending + data)
    rest = reader.getstate()[0]
    if pending and _ESCAPED.match(out):
        out = out[len(pending) :]  # the pending bytes were invalid; the tokens that held them display them
    shown = _ESCAPED.sub(lambda broken: _hex(broken[0].encode("utf-8", "surrogateescape")), out)
    if rest:
        shown += _hex(rest[max(len(rest) - len(data), 0) :])
    return TokenText(_ESCAPED.sub("", out), shown, special), rest


def _hex(data: bytes) -> str:
    return f"⟨{data.hex(' ').upper()}⟩" if data else ""


def _component_types(component: Any) -> set[str]:
    """Return the types of a decoder's or pre-tokenizer's components; none for None."""
    if component is None:
        return set()
    state = json.loads(component.__getstate__())
    parts = [state, *state.get("decoders", ()), *state.get("pretokenizers", ())]
    return {part["type"] for part in parts}


_cache: OrderedDict[str, TokenTexts] = OrderedDict()
_cache_lock = Lock()


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
    configured = _in_directory(config.model.tokenizer)
    if configured is not None:
        return configured
    for key in dict.fromkeys((policy_key, *others)):
        tokenizer = _in_policy(store, key)
        if tokenizer is not None:
            return tokenizer
    return _in_directory(config.model.path)


def open_tokenizer(directory: str | Path) -> TokenTexts:
    """Open the tokenizer of a directory. Raises TokenizerUnreadable where there is none, or no usable one."""
    path = Path(directory).expanduser() / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerUnreadable(f"{path} cannot be read: {error.strerror}. Token ids can be looked at") from error
    return _cached_tokenizer(hashlib.sha256(data).hexdigest(), lambda: data, str(path))


def _in_directory(directory: str) -> TokenTexts | None:
    """Return the tokenizer of a local directory; None for no name, a name on a hub, or a directory without the file."""
    if not directory or not (Path(directory).expanduser() / FILE).is_file():
        return None
    return open_tokenizer(directory)


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
    found, path = policy, policy.place_of(file)
    try:
        return _cached_tokenizer(file.sha256, lambda: store.policies.read_file(found, file), store.root.child(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerUnreadable(f"{path} cannot be read: {error}. Token ids can be looked at") from error


def _cached_tokenizer(digest: str, read: Callable[[], bytes], where: str) -> TokenTexts:
    """Return the tokenizer with this digest from the cache, or read it."""
    # The lock is held while a file is read, so that two pages do not load the same tokenizer side by side.
    with _cache_lock:
        if digest not in _cache:
            _cache[digest] = _parse_tokenizer(read(), where)
        _cache.move_to_end(digest)
        while len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
        return _cache[digest]


def _parse_tokenizer(data: bytes, where: str) -> TokenTexts:
    from tokenizers import Tokenizer

    try:
        return TokenTexts(Tokenizer.from_buffer(data))
    except Exception as error:  # the library raises no narrower class
        raise TokenizerUnreadable(
            f"{where} is no tokenizer that can be opened: {error}. Everything else can be looked at, tokens by their "
            "ids; put the file back from a copy"
        ) from error

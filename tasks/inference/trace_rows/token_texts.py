"""The text that each token adds, by the tokenizer of a run, which is found without loading a model."""

import codecs
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.run import RunConfig
from storage.store import Store

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_TOKEN_ID = 2**32 - 1
"""The highest number that the library takes for a token's."""
ANCHOR = "a"
"""A token that decodes to itself under every decoder: what stands beside it shows what it adds."""
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
    """The same for people, with the bytes of characters that do not end here, or of none: ⟨E2 82⟩, ⟨id 12345⟩."""
    special: bool
    """Whether the tokenizer calls it special: a mark of its own, not a piece of text."""

    @property
    def whole(self) -> bool:
        """Whether the token ends where a character does, and holds no bytes of which none can be made."""
        return self.text == self.shown


class _KnownToken(NamedTuple):
    """What is known of one id."""

    alone: TokenText | None
    """What it adds where no character is begun before it; None where it is no whole characters by itself."""
    data: bytes | None
    """Its bytes; None for one that stands for text, whatever stands before it."""
    token: str
    """How the vocabulary spells it."""


class TokenTexts:
    """The texts of a tokenizer's tokens: `TokenTexts(tokenizer).of(ids)`. Safe to share between threads."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._decoder: Any = tokenizer.decoder
        kinds = _component_types(self._decoder or tokenizer.pre_tokenizer)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._around = self._decode([ANCHOR, ANCHOR])[len(ANCHOR) :]
        self._pieces: dict[int, _KnownToken] = {}

    def of(self, ids: Iterable[int], begins: bool = True) -> list[TokenText]:
        """Return what each token adds to the text, one for each id, ids that the tokenizer lacks included.

        `begins` says that the first is the first of its text: some decoders leave out a space there.
        """
        found: list[TokenText] = []
        pieces, pending = self._pieces, b""
        numbers = list(ids)
        for number in numbers:
            piece = pieces.get(number) or self._learn(number)
            if piece is None:
                found.append(TokenText("", f"⟨id {number}⟩", False))
            elif piece.alone is not None and (not pending or piece.data is None):
                found.append(piece.alone)
                pending = b""
            else:
                told, pending = _decode_bytes(pending, piece.data or b"", self._is_special(number))
                found.append(told)
        return self._at_the_ends(numbers, found, begins)

    def _learn(self, number: int) -> _KnownToken | None:
        """Find out about an id and remember it; None where the vocabulary has no such id."""
        token = self._tokenizer.id_to_token(int(number)) if 0 <= number <= MAX_TOKEN_ID else None
        if token is None:
            return None
        special = self._is_special(number)
        data = self._bytes_of(number, token)
        if data is None:
            text = self._between(token)
            piece = _KnownToken(TokenText(text, text, special), None, token)
        else:
            told, rest = _decode_bytes(b"", data, special)
            piece = _KnownToken(None if rest else told, data, token)
        self._pieces[number] = piece
        return piece

    def _bytes_of(self, number: int, token: str) -> bytes | None:
        """Return the bytes that a token stands for; None where the decoder makes text of it."""
        if self._byte_level:
            if number in self._added or not all(each in BYTE_OF_CHARACTER for each in token):
                return token.encode()
            return bytes(BYTE_OF_CHARACTER[each] for each in token)
        found = _BYTE.fullmatch(token) if self._byte_fallback else None
        return bytes([int(found[1], 16)]) if found else None

    def _between(self, token: str, first: bool = False, last: bool = False) -> str:
        """Return what a token adds between two others, or at an end of a text."""
        before, after = [] if first else [ANCHOR], [] if last else [ANCHOR]
        whole = self._decode([*before, token, *after])
        return whole[len(ANCHOR) * len(before) :].removesuffix("" if last else self._around)

    def _at_the_ends(self, numbers: list[int], found: list[TokenText], begins: bool) -> list[TokenText]:
        """Put right what the first and the last token add: some decoders leave out a space at the ends of a text."""
        start = next((place for place, number in enumerate(numbers) if number in self._pieces), None)
        if start is None:
            return found
        end = next(place for place in reversed(range(len(numbers))) if numbers[place] in self._pieces)
        for place in {start, end}:
            piece = self._pieces[numbers[place]]
            if piece.data is None:
                text = self._between(piece.token, begins and place == start, place == end)
                found[place] = TokenText(text, text, found[place].special)
        return found

    def _is_special(self, number: int) -> bool:
        return number in self._added and bool(self._added[number].special)

    def _decode(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(tokens))


def _decode_bytes(pending: bytes, data: bytes, special: bool) -> tuple[TokenText, bytes]:
    """Return what bytes add to the text after those of a character that is begun, and the begun ones after them."""
    reader = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    out = reader.decode(pending + data)
    rest = reader.getstate()[0]
    if pending and _ESCAPED.match(out):
        out = out[len(pending) :]  # what was begun came to nothing; its own tokens show it
    shown = _ESCAPED.sub(lambda broken: _hex(broken[0].encode("utf-8", "surrogateescape")), out)
    if rest:
        shown += _hex(rest[max(len(rest) - len(data), 0) :])
    return TokenText(_ESCAPED.sub("", out), shown, special), rest


def _hex(data: bytes) -> str:
    return f"⟨{data.hex(' ').upper()}⟩" if data else ""


def _component_types(component: Any) -> set[str]:
    """Return the types of what a decoder or pre-tokenizer consists of; none of None."""
    if component is None:
        return set()
    state = json.loads(component.__getstate__())
    parts = [state, *state.get("decoders", ()), *state.get("pretokenizers", ())]
    return {part["type"] for part in parts}


FILE = "tokenizer.json"
MAX_CACHED = 8
"""Opened tokenizers that are held in memory; those of a run's policies are one, as their files are the same."""
_cache: OrderedDict[str, TokenTexts] = OrderedDict()
_cache_lock = Lock()


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
    return _cached_tokenizer(hashlib.sha256(data).hexdigest(), lambda: data, str(path))


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
        return _cached_tokenizer(file.sha256, lambda: store.root.read(place), store.root.child(place))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerUnreadable(f"{place} cannot be read: {error}. Token ids can be looked at") from error


def _cached_tokenizer(digest: str, read: Callable[[], bytes], where: str) -> TokenTexts:
    """Return the tokenizer of a digest; it is read and made where it is not held in memory."""
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
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerUnreadable(
            f"{where} is no tokenizer that can be opened: {error}. Everything else can be looked at, tokens by their "
            "ids; put the file back from a copy"
        ) from error

"""What each token adds to a text, and where the tokenizer of a run is found."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from configs.run import RunConfig
from storage.store import Store, open_store
from tasks.inference.trace_rows import token_texts as run_tokenizer
from tasks.inference.trace_rows.token_texts import (
    FILE,
    TokenizerUnreadable,
    TokenText,
    TokenTexts,
    open_tokenizer,
    tokenizer_of,
)

if TYPE_CHECKING:
    from tests.fixtures.s3_host import S3Host

SENTENCES = ["naïve 🙂🙂 日本日本 привет hello hello, it's here", "日本 🙂 hello привет"] * 4
WORDS = st.text(st.sampled_from("hel o,'nïж日本🙂👩\u200d\n\u202e\x1b."), max_size=20)


def byte_level() -> Tokenizer:
    """A tokenizer over bytes whose merges cut characters anywhere."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<|im_end|>"])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("éa", normalized=False)])
    return made


def byte_fallback() -> Tokenizer:
    """A tokenizer in the way of Llama 2: ▁ for a space, a byte each for characters that it lacks."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helon,'.", "he", "▁he"]
    made = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("h", "e"), ("▁", "he")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>"])
    return made


def metaspace() -> Tokenizer:
    """A tokenizer over words that begin with ▁."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"], show_progress=False)
    )
    return made


def word_piece() -> Tokenizer:
    """A tokenizer in the way of BERT: ## continues a word, and punctuation is drawn to the word before."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = ["[UNK]", "[SEP]"]
    made.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=70, special_tokens=special, show_progress=False)
    )
    return made


def suffixed() -> Tokenizer:
    """A tokenizer in the way of the first GPT: </w> ends a word."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=70, end_of_word_suffix="</w>", special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator(SENTENCES, trainer)
    return made


MADE = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, word_piece, suffixed)}
TEXTS = {name: TokenTexts(made) for name, made in MADE.items()}


def ids_of(name: str, text: str) -> list[int]:
    return list(MADE[name].encode(text).ids)


@pytest.mark.parametrize("name", MADE)
@given(st.lists(WORDS, max_size=6))
@example(["🙂", "日本", "naïve"])
@example([" ", "", "  hello"])
def test_texts_concatenate_to_what_the_tokenizer_decodes(name: str, words: list[str]) -> None:
    ids = ids_of(name, " ".join(words))
    told = TEXTS[name].of(ids)
    assert len(told) == len(ids)
    assert "".join(each.text for each in told) == MADE[name].decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(-3, 310), max_size=12))
def test_bytes_of_no_character_are_shown_and_break_nothing(ids: list[int]) -> None:
    told = TEXTS["byte_level"].of(ids)
    raw = b"".join(stands_for("byte_level", number) for number in ids)
    assert "".join(each.text for each in told) == raw.decode(errors="ignore")
    for number, each in zip(ids, told, strict=True):
        assert each.whole or "⟨" in each.shown
        assert each.shown or not stands_for("byte_level", number)


def stands_for(name: str, number: int) -> bytes:
    """The bytes of a token, by the slow way: the tokenizer's own alphabet beside the texts of its bytes."""
    token = MADE[name].id_to_token(number) if number >= 0 else None
    added = MADE[name].get_added_tokens_decoder()
    if token is None or number in added:
        return (token or "").encode()
    return bytes(ALPHABET[each] for each in token)


def alphabet() -> dict[str, int]:
    """Which byte each character of the byte-level alphabet stands for, asked of the library one character at a time.

    Bytes that no text has, such as 0xFF, stand for themselves, as all from 0xAE do.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {chr(byte): byte for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    leading = [chr(max(first << 12, 0x800)) for first in range(16) if first != 13]
    leading += ["\ud000", *(chr(max(first << 18, 0x10000)) for first in range(5))]
    for each in [*map(chr, range(0x800)), *leading]:
        found |= dict(zip(split.pre_tokenize_str(each)[0][0], each.encode(), strict=True))
    assert sorted(found.values()) == list(range(256))
    return found


ALPHABET = alphabet()


def test_a_character_belongs_to_its_last_token() -> None:
    vocabulary = MADE["byte_level"].get_vocab()
    byte = {value: vocabulary[key] for key, value in ALPHABET.items()}
    told = TEXTS["byte_level"].of([byte[each] for each in b"a\xe2\x82\xac\xffb\xe2" + b"c"])
    assert [each.shown for each in told] == ["a", "⟨E2⟩", "⟨82⟩", "€", "⟨FF⟩", "b", "⟨E2⟩", "c"]
    assert [each.text for each in told] == ["a", "", "", "€", "", "b", "", "c"]
    assert [each.whole for each in told] == [True, False, False, True, False, True, False, True]


def test_merged_bytes_are_shown_where_they_lie() -> None:
    pieces = {"Ã": 0, "©": 1, "aÃ": 2, "©bÃ": 3, "Ã©": 4, "ÿa": 5}
    made = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    made.decoder = decoders.ByteLevel()
    told = TokenTexts(made).of([2, 3, 1, 4, 5, 0, 5])
    assert [each.shown for each in told] == ["a⟨C3⟩", "éb⟨C3⟩", "é", "é", "⟨FF⟩a", "⟨C3⟩", "⟨FF⟩a"]
    assert "".join(each.text for each in told) == "aébééaa"


def test_special_and_added_tokens_stand_for_what_they_say() -> None:
    ids = ids_of("byte_level", "hello<|im_end|><think>éa")
    assert [(each.shown, each.special) for each in TEXTS["byte_level"].of(ids)][-3:] == [
        ("<|im_end|>", True),
        ("<think>", False),
        ("éa", False),
    ]


@pytest.mark.parametrize("name", MADE)
def test_ids_that_no_vocabulary_has_are_said(name: str) -> None:
    told = TEXTS[name].of([12345, -1, 2**40])
    assert told == [TokenText("", f"⟨id {number}⟩", False) for number in (12345, -1, 2**40)]
    assert TEXTS[name].of([]) == []


def test_a_space_is_left_out_where_a_text_begins_and_nowhere_else() -> None:
    hello = ids_of("byte_fallback", "he he")
    assert [each.text for each in TEXTS["byte_fallback"].of(hello)] == ["he", " he"]
    assert [each.text for each in TEXTS["byte_fallback"].of(hello, begins=False)] == [" he", " he"]
    assert [each.text for each in TEXTS["byte_fallback"].of([99999, *hello])] == ["", "he", " he"]


def test_a_byte_of_its_own_token_is_shown() -> None:
    told = TEXTS["byte_fallback"].of(ids_of("byte_fallback", "h🙂"))
    assert [each.shown for each in told] == ["", "h", "⟨F0⟩", "⟨9F⟩", "⟨99⟩", "🙂"]


def test_a_tokenizer_without_a_decoder_is_read_by_what_splits_its_text() -> None:
    made = byte_level()
    ids = made.encode("naïve 日本").ids
    made.decoder = None
    assert "".join(each.text for each in TokenTexts(made).of(ids)) == "naïve 日本"
    plain = Tokenizer(models.WordLevel(vocab={"one": 0, "two": 1}, unk_token="one"))
    assert [each.text for each in TokenTexts(plain).of([0, 1, 0])] == ["one", " two", " one"]


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    run_tokenizer._cache.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def model(directory: Path, word: str) -> Path:
    """A directory of weights whose tokenizer has one word, its token 0."""
    directory.mkdir(parents=True)
    made = Tokenizer(models.BPE(vocab={word: 0}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / FILE))
    (directory / "model.safetensors").write_bytes(directory.name.encode())
    return directory


def config(**section: str) -> RunConfig:
    return RunConfig.model_validate({"seed": 7, "model": section})


def word(found: TokenTexts | None) -> str | None:
    return found.of([0])[0].text if found is not None else None


@pytest.mark.parametrize(
    ("key", "others", "names", "word"),
    [
        ("a", [], {}, "one"),
        ("b", ["a"], {}, "two"),
        ("gone", ["gone", "gone_too", "a"], {}, "one"),
        ("gone", [], {}, None),
        ("../../etc", [], {}, None),
        ("adapter", ["a"], {}, "one"),  # it has no tokenizer
        ("a", [], {"tokenizer": "named"}, "three"),
        ("a", [], {"path": "begun"}, "one"),
        ("gone", [], {"path": "begun"}, "four"),
        ("gone", [], {"path": "someone/on-a-hub", "tokenizer": "someone/on-a-hub"}, None),
        ("", [], {"path": "begun", "tokenizer": "begun"}, None),  # what another model sampled
    ],
)
def test_the_tokenizer_that_was_named_comes_first_then_the_policies_and_the_model_last(
    tmp_path: Path, store: Store, key: str, others: list[str], names: dict[str, str], word: str | None
) -> None:
    directories = {name: str(model(tmp_path / name, text)) for name, text in (("named", "three"), ("begun", "four"))}
    for name, text in (("a", "one"), ("b", "two")):
        store.policies.publish(model(tmp_path / name, text), name)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    store.policies.publish(tmp_path / "adapter", "adapter")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    section = {setting: directories.get(name, name) for setting, name in names.items()}
    found = tokenizer_of(store, RunConfig.model_validate({"seed": 7, "model": section}), key, others)
    assert (found.of([0])[0].text if found else None) == word
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before, "nothing is written"


def test_equal_files_are_opened_once_and_given_up_in_their_turn(tmp_path: Path, store: Store) -> None:
    for name in ("x", "y"):
        store.policies.publish(model(tmp_path / name, "same"), name)
    assert tokenizer_of(store, config(), "x") is tokenizer_of(store, config(), "y")
    opened = [open_tokenizer(model(tmp_path / name, name)) for name in "abcdefghi"]
    assert len(opened) > len(run_tokenizer._cache) == run_tokenizer.MAX_CACHED
    assert open_tokenizer(tmp_path / "i") is opened[-1]
    assert open_tokenizer(tmp_path / "a") is not opened[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version":"1.0","model":{"type":"Other"}}', "\xff\0"])
def test_a_damaged_file_is_told_of(tmp_path: Path, store: Store, text: str) -> None:
    directory = model(tmp_path / "a", "one")
    (directory / FILE).write_text(text, encoding="latin-1")
    with pytest.raises(TokenizerUnreadable, match="no tokenizer that can be opened"):
        open_tokenizer(directory)
    store.policies.publish(directory, "a")
    with pytest.raises(TokenizerUnreadable, match="policies/a"):
        tokenizer_of(store, config(), "a")


def test_a_file_that_is_gone_is_no_tokenizer(tmp_path: Path, store: Store) -> None:
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    (tmp_path / "store/policies/a" / FILE).unlink()
    assert tokenizer_of(store, config(), "a") is None
    with pytest.raises(TokenizerUnreadable, match="No such file"):
        open_tokenizer(tmp_path / "store/policies/a")


@pytest.mark.parametrize("manifest", ["", "{", "{}", "[]", '{"files": 3, "weights_sha256": "", "below": ""}'])
def test_a_policy_with_a_damaged_manifest_is_passed_by(tmp_path: Path, store: Store, manifest: str) -> None:
    for key, said in (("a", "one"), ("b", "two")):
        store.policies.publish(model(tmp_path / key, said), key)
    (tmp_path / "store/policies/a/manifest.json").write_text(manifest)
    assert tokenizer_of(store, config(), "a") is None
    assert word(tokenizer_of(store, config(), "a", others=["b"])) == "two"


def test_a_file_that_cannot_be_read_is_told_of(tmp_path: Path, store: Store) -> None:
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    file = tmp_path / "store/policies/a" / FILE
    file.unlink()
    file.mkdir()
    with pytest.raises(TokenizerUnreadable, match="policies/a"):
        tokenizer_of(store, config(), "a")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> "Iterator[S3Host]":
    """An object store on loopback, in the environment as a user would name it."""
    from tests.fixtures.s3_host import S3Host

    started = S3Host()
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    yield started
    started.stop()


@pytest.mark.engine
def test_in_an_object_store_one_file_is_read_and_no_weights(tmp_path: Path, host: "S3Host") -> None:
    place = host.new_place()
    open_store(place).policies.publish(model(tmp_path / "a", "one"), "a")
    store = open_store(place)
    host.requests()
    assert word(tokenizer_of(store, config(), "gone", others=["a"])) == "one"
    asked = host.requests()
    assert any(FILE in each for each in asked)
    assert not any("safetensors" in each or each.startswith(("PUT", "POST", "DELETE")) for each in asked)

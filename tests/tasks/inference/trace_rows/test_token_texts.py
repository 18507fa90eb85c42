"""What each token adds to a text, and where the tokenizer of a run is found."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from configs.run import RunConfig
from storage.store import open_store
from tasks.inference.trace_rows import token_texts as run_tokenizer
from tasks.inference.trace_rows.token_texts import (
    FILE,
    TokenizerUnreadable,
    TokenText,
    TokenTexts,
    tokenizer_of,
)

SENTENCES = ["naïve 🙂🙂 日本日本 привет hello hello, it's here", "日本 🙂 hello привет"] * 4


def byte_level():
    """A tokenizer over bytes whose merges cut characters anywhere."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<|im_end|>"])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def byte_fallback():
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


MADE = {make.__name__: make() for make in (byte_level, byte_fallback)}
TEXTS = {name: TokenTexts(made) for name, made in MADE.items()}


def ids_of(name, text):
    return MADE[name].encode(text).ids


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", ["naïve 日本 🙂", "hello", "it's here, hello"])
def test_texts_concatenate_to_what_the_tokenizer_decodes(name, text):
    ids = ids_of(name, text)
    found = TEXTS[name].of(ids)
    assert len(found) == len(ids)
    decoded = "".join(token.text for token in found if not token.text.startswith("⟨id "))
    assert decoded == MADE[name].decode(ids, skip_special_tokens=False)


def test_a_character_belongs_to_its_last_token():
    ids = ids_of("byte_fallback", "h🙂")
    assert [token.text for token in TEXTS["byte_fallback"].of(ids)][-4:] == [*(f"⟨id {n}⟩" for n in ids[-4:-1]), "🙂"]


@pytest.mark.parametrize("name", MADE)
def test_any_ids_have_a_text_each(name):
    ids = [*range(MADE[name].get_vocab_size()), *range(MADE[name].get_vocab_size())[::-1]]
    found = TEXTS[name].of([*ids, 12345, -1, 2**40])
    assert len(found) == len(ids) + 3 and all(token.text for token in found[len(ids) :])
    assert TEXTS[name].of([12345, -1, 2**40]) == [TokenText(f"⟨id {n}⟩", False) for n in (12345, -1, 2**40)]
    assert TEXTS[name].of([]) == []


def test_special_and_added_tokens_stand_for_what_they_say():
    found = TEXTS["byte_level"].of(ids_of("byte_level", "hello<|im_end|><think>"))
    assert found[-2:] == [("<|im_end|>", True), ("<think>", False)]


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch):
    run_tokenizer._cache.clear()


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def model(directory, word):
    """A directory of weights whose tokenizer has one word, its token 0."""
    directory.mkdir(parents=True)
    made = Tokenizer(models.BPE(vocab={word: 0}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / FILE))
    (directory / "model.safetensors").write_bytes(directory.name.encode())
    return directory


@pytest.fixture
def publish(tmp_path, store):
    """Publishes policies by name, whose tokenizers have one word each."""

    def publish(**words):
        for name, text in words.items():
            store.policies.publish(model(tmp_path / name, text), name)

    return publish


def word_of(store, key, others=(), **section):
    """The only word of the tokenizer that is found for a policy; None without one."""
    found = tokenizer_of(store, RunConfig.model_validate({"seed": 7, "model": section}), key, others)
    return found.of([0])[0].text if found else None


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
    tmp_path, store, publish, key, others, names, word
):
    directories = {name: str(model(tmp_path / name, text)) for name, text in (("named", "three"), ("begun", "four"))}
    publish(a="one", b="two")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    store.policies.publish(tmp_path / "adapter", "adapter")

    def times():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}

    before = times()
    section = {setting: directories.get(name, name) for setting, name in names.items()}
    assert word_of(store, key, others, **section) == word
    assert times() == before, "nothing is written"


def test_equal_files_are_opened_once(store, publish):
    publish(x="same", y="same")
    assert tokenizer_of(store, RunConfig(), "x") is tokenizer_of(store, RunConfig(), "y")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version":"1.0","model":{"type":"Other"}}', "\xff\0"])
def test_a_damaged_file_is_told_of(tmp_path, store, text):
    directory = model(tmp_path / "a", "one")
    (directory / FILE).write_text(text, encoding="latin-1")
    with pytest.raises(TokenizerUnreadable, match="no tokenizer that can be opened"):
        word_of(store, "gone", tokenizer=str(directory))
    store.policies.publish(directory, "a")
    with pytest.raises(TokenizerUnreadable, match="policies/a"):
        word_of(store, "a")


def test_a_file_that_is_gone_is_no_tokenizer(tmp_path, store, publish):
    publish(a="one")
    (tmp_path / "store/policies/a" / FILE).unlink()
    assert word_of(store, "a") is None


@pytest.mark.parametrize("manifest", ["", "{", "{}", "[]", '{"files": 3, "weights_sha256": "", "below": ""}'])
def test_a_policy_with_a_damaged_manifest_is_passed_by(tmp_path, store, publish, manifest):
    publish(a="one", b="two")
    (tmp_path / "store/policies/a/manifest.json").write_text(manifest)
    assert word_of(store, "a") is None and word_of(store, "a", ["b"]) == "two"


@pytest.fixture
def host(monkeypatch):
    """An object store on loopback, in the environment as a user would name it."""
    from tests.fixtures.s3_host import S3Host

    started = S3Host()
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    yield started
    started.stop()


@pytest.mark.engine
def test_in_an_object_store_one_file_is_read_and_no_weights(tmp_path, host):
    place = host.new_place()
    open_store(place).policies.publish(model(tmp_path / "a", "one"), "a")
    store = open_store(place)
    host.requests()
    assert word_of(store, "gone", ["a"]) == "one"
    asked = host.requests()
    assert any(FILE in each for each in asked)
    assert not any("safetensors" in each or each.startswith(("PUT", "POST", "DELETE")) for each in asked)

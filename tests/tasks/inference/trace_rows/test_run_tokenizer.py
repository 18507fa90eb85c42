"""Where the tokenizer of a run is found: the policies of a store, a directory of its own, the model it began with."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, decoders, models

from configs.run import RunConfig
from storage.store import Store, open_store
from tasks.inference.trace_rows import token_texts as run_tokenizer
from tasks.inference.trace_rows.token_texts import FILE, TokenizerUnreadable, TokenTexts, open_tokenizer, tokenizer_of

if TYPE_CHECKING:
    from tests.fixtures.s3_host import S3Host


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


def test_it_lies_in_the_policy(tmp_path: Path, store: Store) -> None:
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    store.policies.publish(model(tmp_path / "b", "two"), "b")
    assert word(tokenizer_of(store, config(), "a")) == "one"
    assert word(tokenizer_of(store, config(), "b", others=["a"])) == "two"


def test_a_policy_that_was_removed_has_that_of_another_policy(tmp_path: Path, store: Store) -> None:
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    assert word(tokenizer_of(store, config(), "gone", others=["gone", "gone_too", "a"])) == "one"
    assert tokenizer_of(store, config(), "gone") is None
    assert tokenizer_of(store, config(), "../../etc") is None


def test_equal_files_are_opened_once(tmp_path: Path, store: Store) -> None:
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    store.policies.publish(model(tmp_path / "b", "one"), "b")
    assert tokenizer_of(store, config(), "a") is tokenizer_of(store, config(), "b")


def test_opened_ones_are_given_up_in_their_turn(tmp_path: Path, store: Store) -> None:
    opened = [open_tokenizer(model(tmp_path / name, name)) for name in "abcdefghi"]
    assert len(opened) > len(run_tokenizer._cache) == run_tokenizer.MAX_CACHED
    assert open_tokenizer(tmp_path / "i") is opened[-1]
    assert open_tokenizer(tmp_path / "a") is not opened[0]


def test_a_tokenizer_that_was_named_comes_first_and_the_model_last(tmp_path: Path, store: Store) -> None:
    named, begun = str(model(tmp_path / "named", "three")), str(model(tmp_path / "begun", "four"))
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    assert word(tokenizer_of(store, config(tokenizer=named), "a")) == "three"
    assert word(tokenizer_of(store, config(path=begun), "a")) == "one"
    assert word(tokenizer_of(store, config(path=begun), "gone")) == "four"
    assert tokenizer_of(store, config(path="someone/on-a-hub", tokenizer="someone/on-a-hub"), "gone") is None


def test_what_another_model_sampled_is_not_read_by_ours(tmp_path: Path, store: Store) -> None:
    begun = str(model(tmp_path / "begun", "four"))
    assert tokenizer_of(store, config(path=begun, tokenizer=begun), "") is None


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


def test_a_policy_without_one_leaves_it_to_the_others(tmp_path: Path, store: Store) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    store.policies.publish(adapter, "adapter")
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    assert word(tokenizer_of(store, config(), "adapter", others=["a"])) == "one"


def test_looking_for_it_writes_nothing(tmp_path: Path, store: Store) -> None:
    store.policies.publish(model(tmp_path / "a", "one"), "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    assert word(tokenizer_of(store, config(), "gone", others=["a"])) == "one"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


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

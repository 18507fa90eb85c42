"""What is kept between rollouts: the tokens of equal prompts; who renders holds the lock, in a thread if need be."""

import asyncio
import inspect
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.inference.environments import tuning
from tasks.inference.environments.tuning import quick_signature, quick_slot, render_once, resolve_or_take_over


@dataclass
class Slot:
    """As verifiers' slots are."""

    renderer: Any
    load: int = 0
    lock: Any = field(default_factory=threading.Lock)

    async def run(self, fn: Any) -> Any:
        """Call under the lock in a thread."""

        def locked() -> Any:
            with self.lock:
                return fn()

        return await asyncio.to_thread(locked)


class Renderer:
    """Counts what it renders."""

    def __init__(self) -> None:
        self.number = 0

    def render(self, messages: Any, **settings: Any) -> list[Any]:
        """Return something new."""
        self.number += 1
        return [messages, settings]


def test_equal_prompts_are_rendered_once_and_the_oldest_is_dropped(monkeypatch: Any) -> None:
    monkeypatch.setattr(tuning, "MOST_RENDERS", 2)
    renderer = Renderer()
    render = render_once(renderer.render)
    asked = [{"role": "user", "content": "a"}]
    assert render(asked, tools=None) is render([dict(asked[0])], tools=None)
    assert render(asked, tools=[{}]) == [asked, {"tools": [{}]}] and renderer.number == 2
    render([], tools=None)
    render(asked, tools=None)
    assert renderer.number == 4, "the first was dropped for the third"
    long = [{"role": "user", "content": "a" * tuning.LONGEST_PROMPT}]
    render(long)
    render(long)
    render([object()])
    assert renderer.number == 7


def test_short_work_stays_on_the_loop_and_long_work_goes_to_a_thread(monkeypatch: Any) -> None:
    now = [0.0]  # a clock of its own: on a busy machine nothing is short
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    async def go() -> None:
        slot = quick_slot(Slot)(Renderer())
        here, held = threading.get_ident(), []

        def work(seconds: float) -> int:
            held.append(slot.lock.locked())
            now[0] += seconds
            return threading.get_ident()

        assert await slot.run(lambda: work(0.01)) == here
        assert await slot.run(lambda: work(0)) != here, "the one before took long"
        assert await slot.run(lambda: work(0)) == here
        assert held == [True] * 3 and not slot.lock.locked()
        slot.lock.acquire()
        asyncio.get_running_loop().call_later(0.05, slot.lock.release)
        assert await slot.run(lambda: work(0)) != here, "another thread renders"

    asyncio.run(go())


def test_the_tokenizer_of_a_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = pytest.importorskip("renderers.base")
    names: list[str] = []

    def load(name: str) -> Any:
        names.append(name)
        return SimpleNamespace(name_or_path=name)

    monkeypatch.setattr(base, "load_tokenizer", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0a1b")
    tuning.use_cached_tokenizers()
    # A renderer is chosen by the name that was asked for.
    assert base.load_tokenizer("some/model").name_or_path == "some/model"
    kimi = next(iter(base.TRUSTED_REVISIONS))
    for name in (str(tmp_path), "another/model", kimi):
        assert base.load_tokenizer(name).name_or_path == name
    assert names == [str(snapshot), str(tmp_path), "another/model", kimi]


def test_a_method_is_looked_at_once_whoever_it_belongs_to() -> None:
    class Task:
        def score(self, trace: Any, *, info: int = 0) -> None:
            """Score nothing."""

        @classmethod
        def named(cls, name: str) -> None:
            """Name nothing."""

    def plain(trace: Any) -> None:
        """Do nothing."""

    for function in (Task().score, Task.named, plain, Task.score):
        assert quick_signature(function) == inspect.signature(function)
    assert quick_signature(Task().score) is quick_signature(Task().score)


@pytest.mark.parametrize("set_by", ["run", "agent", "both", "neither"])
def test_sampling_parameters_are_taken_over_as_verifiers_would_merge_them(set_by: str) -> None:
    from verifiers.v1.configs.agent import AgentConfig, resolve_agent
    from verifiers.v1.types import SamplingConfig

    given = {"temperature": 0.5, "max_completion_tokens": 7, "extra_body": {"seed": 3, "cache_salt": "a"}}
    run = SamplingConfig(**given) if set_by in ("run", "both") else None
    own = {"sampling": {"top_p": 0.9, "max_tokens": None, "seed": 4}} if set_by in ("agent", "both") else {}
    spec = AgentConfig.model_validate({"model": "mine", **own})
    asked = {"model": "run's", "client": None, "sampling": run, "harness": None}
    expected, found = resolve_agent(spec, **asked), resolve_or_take_over(resolve_agent)(spec, **asked)
    assert found == expected and found.model_dump() == expected.model_dump()
    assert found.model_dump_json(exclude_unset=True) == expected.model_dump_json(exclude_unset=True)
    assert found.sampling.model_fields_set == expected.sampling.model_fields_set
    assert resolve_or_take_over(resolve_agent)(found) == resolve_agent(expected)


def test_the_header_of_replies_is_encoded_once() -> None:
    from renderers import reasoning

    class Tokenizer:
        calls = 0

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            self.calls += 1
            return [*text.encode()]

        def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return bytes(ids).decode()

    original = getattr(reasoning._after_header, "__wrapped__", reasoning._after_header)
    skip, tokenizer = tuning.encode_once(original), Tokenizer()
    for text, rest in (("head\n\nx", "x"), ("xhead\n", "xhead\n"), ("head", "")):
        assert skip(tokenizer, [*text.encode()], "head") == [*rest.encode()]
    assert skip(tokenizer, [*b"ahead\n1"], "head", last=True) == [*b"1"]
    assert tokenizer.calls == 1


def test_a_rollout_makes_its_directory_when_something_asks_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    from verifiers.v1.runtimes import subprocess as local

    # A copy of the class: the tests' own process keeps verifiers' behaviour.
    runtime = type("Runtime", (local.SubprocessRuntime,), dict(vars(local.SubprocessRuntime)))
    monkeypatch.setattr(local, "SubprocessRuntime", runtime)
    monkeypatch.setattr(local, "CACHE_DIR", tmp_path)
    tuning.make_directories_late()
    tuning.make_directories_late()

    async def run() -> None:
        idle, busy = (runtime(local.SubprocessConfig(), name) for name in ("idle", "busy"))
        for each in (idle, busy):
            await each.start()
            assert Path(each.info.id).parent == tmp_path / "runtimes/subprocess"
        assert not list(tmp_path.iterdir())
        done = await busy.run([sys.executable, "-c", "open('made', 'w')"], {})
        assert done.exit_code == 0 and await busy.read("made") == b""
        assert [path.name for path in (tmp_path / "runtimes/subprocess").iterdir()] == ["busy"]
        for each in (idle, busy):
            await each.teardown()
            each.cleanup()
        assert not list((tmp_path / "runtimes/subprocess").iterdir())

    asyncio.run(run())

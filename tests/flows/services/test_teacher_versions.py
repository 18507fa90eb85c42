"""What is known of teachers before anything starts: versions, and every reason why one cannot teach."""

import asyncio

import pytest
from aiohttp import web

from configs.errors import ConfigError
from configs.replay import ReplayConfig
from configs.resolve import resolve
from configs.run import RunConfig, content
from flows.services.teachers import asked_teachers, reopened_teachers, require_teachers, teacher_facts
from tasks.inference.engine.model_info import directory_digest
from tests.fixtures.builders import model
from tests.fixtures.endpoints import endpoint


def run_of(root, environment, **sections):
    """Return a run of the model `policy` below `root` in an environment."""
    weights = model(root / "policy", b"policy")
    own = {"seed": 1, "environments": [{"name": "e", "taskset": {"id": "t"}} | environment]}
    return RunConfig.model_validate(own | {"model": {"path": str(weights), "vocab_size": 512}} | sections)


def config(root, kind="opd", **teacher):
    """Return a run with the teacher `teacher` below `root`."""
    return run_of(root, {}, algorithm={"type": kind, "teacher": {"path": str(root / "teacher")} | teacher})


@pytest.mark.parametrize("kind", ["opd", "sft"])
def test_the_version_is_the_digest_of_the_weights_and_is_filled_in(tmp_path, kind):
    digest = directory_digest(model(tmp_path / "teacher", b"teacher"))
    found = config(tmp_path, kind)
    assert teacher_facts(found) == {"teachers": {"algorithm.teacher": digest}}
    resolved = resolve(found, teacher_facts(found))
    assert resolved.algorithm.teacher.version == digest
    require_teachers(resolved)
    assert teacher_facts(resolved) == teacher_facts(found)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    model(tmp_path / "teacher", b"teacher", tokenizer="other words")
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.path: the tokenizer of"):
        teacher_facts(config(tmp_path))


def test_other_weights_than_recorded_are_refused(tmp_path):
    recorded = config(tmp_path, version="another digest")
    model(tmp_path / "teacher", b"teacher")
    for look in (teacher_facts, require_teachers):
        with pytest.raises(ConfigError, match=r"algorithm\.teacher\.version: recorded as 'another digest'"):
            look(recorded)
    assert reopened_teachers(recorded).algorithm.teacher.version == ""


def test_a_recorded_teacher_that_is_gone_is_missed_when_it_is_asked(tmp_path):
    recorded = config(tmp_path, version="its digest", path=str(tmp_path / "gone"))
    assert teacher_facts(recorded) == {"teachers": {}}
    assert reopened_teachers(recorded) == recorded
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.path: .*gone is no directory"):
        require_teachers(recorded)


@pytest.mark.parametrize("place", ["algorithm.teacher", "environments.0.seats.rival.model"])
def test_an_engine_of_others_that_does_not_answer_is_refused(tmp_path, place):
    run = config if place.startswith("algorithm") else seated
    with pytest.raises(ConfigError, match=rf"{place}\.url: no answer from the engine at http://127.0.0.1:9"):
        teacher_facts(run(tmp_path, path="", url="http://127.0.0.1:9"))


def replaying(config, begin, until="packing"):
    replay = ReplayConfig(run="base", from_stage=begin, until=until)
    return config.model_copy(update={"kind": "replay", "replay": replay})


@pytest.mark.parametrize(
    ("kind", "begin", "until", "asked"),
    [
        ("opd", "advantage", "packing", True),
        ("opd", "packing", "training", False),
        ("opd", "rollout", "rollout", False),
        ("sft", "rollout", "filtering", True),
        ("sft", "advantage", "training", False),
    ],
)
def test_a_replay_asks_the_teachers_of_what_it_does_again(tmp_path, kind, begin, until, asked):
    assert bool(list(asked_teachers(replaying(config(tmp_path, kind), begin, until)))) == asked


def seated(root, kind="train", **player):
    """Return a run in which a frozen model plays the seat `rival`."""
    seats = {"rival": {"model": {"path": str(root / "player")} | player}, "other": {"max_turns": 2}}
    return run_of(root, {"seats": seats}, kind=kind)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_frozen_seat_s_version_is_filled_in_and_is_in_keys(tmp_path, kind):
    digest = directory_digest(model(tmp_path / "player", b"player"))
    found = seated(tmp_path, kind)
    assert teacher_facts(found) == {"teachers": {"environments.0.seats.rival.model": digest}}
    resolved = resolve(found, teacher_facts(found))
    assert resolved.environments[0].seats["rival"].model.version == digest
    require_teachers(resolved)
    assert content(resolved.environments[0])["seats"]["rival"]["model"]["version"] == digest
    assert reopened_teachers(resolved).environments[0].seats["rival"].model.version == ""


@pytest.mark.parametrize(
    ("kind", "begin", "asked"),
    [
        *(("train", "", True), ("evaluate", "", True), ("sft", "", False), ("replay", "", False)),
        *(("train", "rollout", True), ("train", "advantage", False)),  # replays
    ],
)
def test_who_samples_asks_the_players(tmp_path, kind, begin, asked):
    run = seated(tmp_path, kind)
    assert bool(list(asked_teachers(replaying(run, begin) if begin else run))) == asked


def test_a_chat_api_is_asked_for_its_models_before_anything_starts(tmp_path, monkeypatch):
    async def models(request):
        assert request.headers["Authorization"] == "Bearer sesame"
        return web.json_response({"data": [{"id": "wise-1"}]})

    async def look(**chat):
        async with endpoint(models, "/v1/models") as url:
            found = config(tmp_path, "sft", path="", chat={"url": f"{url}/v1", "api_key_variable": "K"} | chat)
            return await asyncio.to_thread(teacher_facts, found)

    monkeypatch.setenv("K", "sesame")
    assert asyncio.run(look(model="wise-1")) == {"teachers": {"algorithm.teacher": "wise-1"}}
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.chat\.model: .* no 'wise-2'; did you mean wise-1\?"):
        asyncio.run(look(model="wise-2"))

"""The engine serves what it says: reloads are exact, and every way to serve something else is caught."""

import json
import shutil

import httpx
import pytest

from tasks.inference.engine.checks import EngineMismatch, check_serving
from tasks.inference.engine.weights_view import WeightsUnusable
from tests.fixtures.engine_calls import answers_to, body
from tests.fixtures.hosts import ENGINE, KEY, engine_of
from tests.tasks.inference.engine.probes import PROBE, policy_row

pytestmark = pytest.mark.engine


@pytest.mark.essential
def test_reload_is_exact_there_and_back_and_takes_no_optimizer_state(small_engine, models, tmp_path):
    rows = {name: policy_row(f"exact-{name}", models[name]) for name in "ab"}
    assert max(abs(x - y) for x, y in zip(*(rows[n]["probe_logprobs"] for n in "ab"), strict=True)) > 0.1
    for name in "aba":
        small_engine.serve(rows[name]["policy_key"], models[name])
        assert small_engine.state().policy_key == f"exact-{name}"
        probe = small_engine.score(PROBE, rows[name]["policy_key"])
        assert probe == pytest.approx(rows[name]["probe_logprobs"], abs=1e-4)
        assert check_serving(small_engine, rows[name], ENGINE) < 1e-4
    beside = shutil.copytree(models["b"], tmp_path / "beside")
    shutil.copy(models["a"] / "model.safetensors", beside / "optimizer.safetensors")
    small_engine.serve("exact-b", beside)
    assert check_serving(small_engine, rows["b"], ENGINE) < 1e-4


@pytest.mark.essential
def test_every_route_but_health_asks_for_the_key(small_engine):
    """Those that change what is served above all, which vLLM's own check leaves open."""
    control = ["/pause", "/resume", "/collective_rpc", "/sleep", "/reset_prefix_cache", "/abort_requests"]
    with httpx.Client(base_url=small_engine.url, trust_env=False) as stranger:
        ours = [f"/inference/v1/{name}" for name in ("weights_sum", "count_tokens")]
        asked = [*control, *ours, "/v1/completions", "/tokenize"]
        answers = {path: stranger.post(path, json={"method": "weights_sum"}).status_code for path in asked}
        answers |= {path: stranger.get(path).status_code for path in ("/v1/models", "/is_paused", "/docs", "/metrics")}
        assert {*answers.values()} == {401}, answers
        wrong = stranger.post("/pause", headers={"Authorization": f"Bearer {KEY}x"})
        assert wrong.status_code == 401
        assert stranger.get("/health").status_code == 200
    assert small_engine.healthy()


def test_sampled_tokens_and_their_log_probs_do_not_depend_on_the_likeliest_token_being_asked_for(small_engine, models):
    small_engine.serve("asked", models["a"])
    for number in range(4):
        ((with_top,), (alone,)) = (answers_to(small_engine, [body(number, logprobs=count)]) for count in (1, 0))
        assert alone.tokens == with_top.tokens and len(alone.tokens) == 12
        assert alone.logprobs == with_top.logprobs and all(value < 0 for value in alone.logprobs)


def test_the_cached_probe_reads_the_cache(small_engine, models, monkeypatch):
    prompts, generate = [], small_engine.generate

    def record(token_ids, **options):
        prompts.append(token_ids)
        return generate(token_ids, **options)

    monkeypatch.setattr(small_engine, "generate", record)
    small_engine.serve("cached", models["a"])
    (first, afresh), (second, _) = (small_engine.probes(PROBE, "cached") for _ in range(2))
    assert first == pytest.approx(second, abs=1e-5)
    assert first == pytest.approx(afresh[-1], abs=1e-4)
    assert prompts == [PROBE[:-1], PROBE] * 2, "afresh the last token is one of the prompt, and not generated again"


def test_a_reload_that_keeps_the_old_weights_is_caught(small_engine, models, monkeypatch):
    small_engine.serve("kept-a", models["a"])
    monkeypatch.setattr(small_engine, "_call_workers", lambda *_, **__: None)
    small_engine.serve("kept-b", models["b"])
    assert small_engine.state().policy_key == "kept-b"  # it acknowledges
    with pytest.raises(EngineMismatch, match="it holds other weights"):
        check_serving(small_engine, policy_row("kept-b", models["b"]), ENGINE)


def test_a_stale_prefix_cache_is_caught(small_engine, models):
    small_engine.serve("stale", models["a"])
    small_engine.probes(PROBE, "stale")
    # Without the pause that empties the cache, and under the salt of the weights before.
    small_engine._call_workers("reload_weights", kwargs={"weights_path": str(models["b"])})
    with pytest.raises(EngineMismatch, match="prefix cache holds states of other weights"):
        check_serving(small_engine, policy_row("stale", models["b"]), ENGINE)


@pytest.mark.essential
def test_another_salt_does_not_read_the_stale_states(small_engine, models):
    small_engine.serve("salt-a", models["a"])
    small_engine.probes(PROBE, "salt-a")
    small_engine._call_workers("reload_weights", kwargs={"weights_path": str(models["b"])})
    assert check_serving(small_engine, policy_row("salt-b", models["b"]), ENGINE) < 1e-4


def test_a_damaged_directory_is_refused_before_the_engine_is_touched(small_engine, models, tmp_path):
    small_engine.serve("whole", models["a"])
    content = (models["b"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    (tmp_path / "config.json").write_text((models["b"] / "config.json").read_text())
    with pytest.raises(WeightsUnusable, match="it is damaged"):
        small_engine.serve("damaged", tmp_path)
    assert small_engine.state().policy_key == "whole"
    assert small_engine.healthy()


def test_an_external_engine_gets_the_weights_as_a_directory(small_engine, models, monkeypatch):
    request, asked = small_engine._request, []

    def without_ours(method, path, **options):
        asked.append(path)
        assert "load_directory" not in str(options), "its workers have no such method"
        # Stagecoach's routes are missing there: they are asked for under a name that the server does not have.
        ours = path in ("/inference/v1/count_tokens", "/inference/v1/weights_sum")
        return request(method, path.replace("/inference", "/not") if ours else path, **options)

    monkeypatch.setattr(small_engine, "_request", without_ours)
    small_engine.serve("external", models["b"])
    assert small_engine.state().policy_key == "external" and small_engine.weights_sum(models["b"]) is None
    begin = asked.index("/pause")
    calls = ["/inference/v1/count_tokens", "/update_weight_version", "/collective_rpc"]
    assert asked[begin + 1 : begin + 4] == calls and "/resume" in asked
    assert check_serving(small_engine, policy_row("external", models["b"]), ENGINE) < 1e-4


@pytest.mark.nightly
def test_a_tied_head_is_reloaded(models, tmp_path):
    with engine_of(models["tied"], tmp_path / "report.json") as tied:
        for name in ("tied", "tied_b", "tied"):
            tied.serve(f"k-{name}", models[name])
            assert check_serving(tied, policy_row(f"k-{name}", models[name]), ENGINE) < 1e-4


def test_a_tied_head_that_was_not_reloaded_is_caught(models, tmp_path):
    # The plain way, as if the head were no trouble: this is what the build does by itself.
    config = ENGINE.model_copy(
        update={"extra_arguments": ("--hf-overrides", json.dumps({"tie_word_embeddings": True}))}
    )
    with engine_of(models["tied"], tmp_path / "report.json", config) as tied:
        tied._call_workers("reload_weights", kwargs={"weights_path": str(models["tied_b"])})
        with pytest.raises(EngineMismatch, match="an output head that was not reloaded"):
            check_serving(tied, policy_row("head", models["tied_b"]), ENGINE)

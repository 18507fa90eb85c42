"""A real run that trains adapters: policies are small, each is served and checked, a restarted engine gets its own.

The engine is killed in the middle of the second step's rollouts, while it serves the first adapter.
"""

import pytest

from storage.policies.manifest import adapter_base
from tasks.learner.digest import weights_sha256
from tests.acceptance.lives import LivedRun, stagecoach
from tests.fixtures.driving import finished, rows

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS = 3
SETTINGS = [
    "training.lora={rank=4, alpha=16}",
    "training.learning_rate=0.01",
    # A model that has learnt nothing earns nothing; that some of its answers are shorter is a signal of its own.
    "algorithm.overlong={max_tokens=40, buffer_tokens=40}",
    f"steps={STEPS}",
]
KILLS = {"after commit rollout 1 part": "engine"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished run."""
    with LivedRun(tmp_path_factory.mktemp("adapted"), *SETTINGS) as run:
        run.live(KILLS)
        yield run


def recorded_policies(store):
    """Return the rows of the policies, by version."""
    return sorted(rows(store)["policies"], key=lambda row: row["version"])


def size(directory):
    """Return the bytes of the weights in a directory."""
    return sum(file.stat().st_size for file in directory.glob("*model*.safetensors"))


def test_policies_are_adapters_over_the_first(run):
    store = run.store
    base, *adapted = recorded_policies(store)
    assert [row["version"] for row in adapted] == list(range(1, STEPS + 1))
    whole = store.policies.directory(base["policy_key"], verify=True)
    assert adapter_base(whole) is None
    assert weights_sha256(whole) == base["weights_sha256"] == weights_sha256(run.model)
    for row in adapted:
        adapter = store.policies.directory(row["policy_key"], verify=True)
        assert adapter_base(adapter) == base["policy_key"]
        assert not (adapter / "config.json").exists()
        assert size(adapter) < size(whole) / 10
    assert len({row["weights_sha256"] for row in (base, *adapted)}) == STEPS + 1


def test_every_version_was_sampled_through_its_own_adapter(run):
    store = run.store
    policies = recorded_policies(store)
    keys = [row["policy_key"] for row in policies]
    sampled = {row["step"]: row["policy_key"] for row in rows(store)["traces"]}
    assert sampled == dict(enumerate(keys[:STEPS]))
    log = (run.root / "logs/run/engine.log").read_text()
    loaded = [line.split("name '")[1].split("'")[0] for line in log.splitlines() if "Loaded new LoRA adapter" in line]
    assert loaded == [keys[1], keys[1], keys[2]], "the engine that came back got the adapter that it had"
    apart = [abs(x - y) for x, y in zip(policies[0]["probe_logprobs"], policies[1]["probe_logprobs"], strict=True)]
    assert max(apart) > 1e-3, "an adapter that does nothing would show nothing"
    updates = sorted(rows(store)["updates"], key=lambda row: row["version"])
    assert all(row["grad_norm"] > 1e-4 for row in updates)
    assert all(row["mismatch_kl_max"] < 1e-6 for row in updates), "what was sampled is what is trained"


def test_the_same_again_finds_everything(run):
    before = {entry.key for entry in finished(run.store)}
    assert "; 0 computed, " in stagecoach("resume", "run", "--store", str(run.root))
    assert {entry.key for entry in finished(run.store)} == before


def test_what_is_exported_is_the_policy(run):
    import torch
    from transformers import AutoModelForCausalLM

    target = run.directory / "exported"
    stagecoach("export", "run", "--format", "weights", "--to", str(target), "--store", str(run.root))
    last = recorded_policies(run.store)[-1]
    tokens = torch.tensor([last["probe_token_ids"]])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    assert found == pytest.approx(last["probe_logprobs"][1:], abs=1e-4)

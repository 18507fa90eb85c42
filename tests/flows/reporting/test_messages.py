"""A run in one line: what a finished step, and a whole run, is said to have come to."""

from flows.reporting.messages import outcome_message, step_message

STEP = {"step": 0, "computed": True, "reward": 0.074, "update": None, "tokens": 3281, "seconds": {"a": 1.0, "b": 2}}
CHANGE = {"set": "", "environment": "words", "figure": "avg", "difference": 0.634}
INTERVAL = {"low": 0.552, "high": 0.716}


def test_a_step():
    assert step_message(STEP) == "reward 0.074, 3,281 tokens, 3.0 s"
    assert step_message(STEP | {"computed": False, "runs": ["demo"]}) == "cached (demo), reward 0.074"
    trained = STEP | {"reward": None, "update": {"loss": 0.25}}
    assert step_message(trained) == "loss 0.250, 3,281 tokens, 3.0 s"


def test_a_run():
    steps = [STEP, STEP | {"reward": None}, STEP | {"reward": 0.82}]
    changes = [CHANGE | {"interval": INTERVAL}, CHANGE | {"figure": "pass@2", "interval": None}]
    outcome = {"steps": steps, "comparisons": changes, "num_computed": 1125, "num_found": 6}
    assert outcome_message(outcome) == (
        "3 steps, reward 0.07 to 0.82, held-out +0.634 [0.552, 0.716]; 1,125 computed, 6 cached"
    )
    sets = [CHANGE | {"set": name, "interval": None} for name in ("a", "b")]
    assert "held-out a/words +0.634, held-out b/words +0.634" in outcome_message(outcome | {"comparisons": sets})


def test_a_run_without_rewards_and_one_without_steps():
    step = STEP | {"reward": None, "update": {"loss": 2.0}}
    assert outcome_message({"steps": [step], "num_computed": 7}) == "1 step, loss 2.00 to 2.00; 7 computed, 0 cached"
    assert outcome_message({"steps": [], "num_computed": 0, "num_found": 4}) == "0 computed, 4 cached"


def test_an_evaluation_and_maintenance():
    scores = {"average": 0.5, "interval": INTERVAL, "pass_at": [], "errors": {}, "num_attempts": 4}
    assert outcome_message({"scores": [scores], "num_computed": 2}).startswith("avg 0.500 [0.552, 0.716]; 2 computed")
    done = {"tables": [1, 2], "merged": 12, "deleted": 1, "gc": {"removed": ["old"]}, "dry_run": True}
    counts = "2 tables, 12 merged files, 1 deleted file, 1 removed run"
    assert outcome_message(done) == f"planned, as nothing is changed: {counts}"
    assert outcome_message(done | {"dry_run": False}) == counts

"""What a run is said to have come to: lost rollouts and figures outside their range, the same in every place."""

from flows.reporting.messages import losses_message


def lost(num_traces, num_truncated, **outcomes):
    """A step as far as its losses; outcomes are counts by detail."""
    shares = [
        {"outcome": outcome, "detail": detail, "num_traces": number}
        for outcome, details in outcomes.items()
        for detail, number in details.items()
    ]
    return {"num_traces": num_traces, "num_truncated": num_truncated, "outcomes": shares}


def test_losses_in_words():
    step = lost(
        16, 1, errored={"timeout": 2, "provider": 1, "sandbox": 1, "program": 1}, filtered={"zero_advantage": 3}
    )
    said = "errored (timeout 2, provider 1, sandbox 1, ...), 1 truncated, 3 dropped (zero_advantage 3)"
    assert losses_message([step]) == f"5 of 16 rollouts {said}"
    assert losses_message([step, step]).startswith("10 of 32 rollouts errored (timeout 4, ")
    assert losses_message([lost(16, 0, trained={"": 16})]) == ""
    assert losses_message([]) == losses_message([{"step": 0}]) == ""

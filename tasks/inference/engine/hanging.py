"""Tells whether an engine that was ready hangs: its API server, or the engine behind it."""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from tasks.inference.engine.client import SERVE_SECONDS, client_options

RETRY_SECONDS = 5.0
COMPUTING_SHARE = 0.01
"""Share of a core's time from which on an engine without an answer computes."""


def hangs(report: Mapping[str, Any], key: str, seconds: float) -> bool:
    """Tell whether an engine hangs; `report` has its `url`, and its `pid` if it runs on this machine.

    Its server hangs where it leaves a question unanswered for `seconds`, and then a second one: the caller itself may
    have been suspended meanwhile. The engine behind it answers between two forward passes: without an answer for
    `seconds` it hangs if it used no processor meanwhile, and else after the longest time that loading weights may take.
    One that is gone, or cannot be reached, does not hang: its end is noticed by the supervisor of its process.
    """
    url = str(report["url"])
    if _leaves_unanswered(f"{url}/health", key, seconds):
        return _leaves_unanswered(f"{url}/health", key, min(seconds, RETRY_SECONDS))
    patient_until = time.monotonic() + max(seconds, SERVE_SECONDS)
    while True:
        before = _processor_seconds(report)
        if not _leaves_unanswered(f"{url}/is_sleeping", key, seconds):
            return False
        used = _processor_seconds(report) - before
        if used < COMPUTING_SHARE * seconds or time.monotonic() > patient_until:
            return _leaves_unanswered(f"{url}/is_sleeping", key, min(seconds, RETRY_SECONDS))
        logging.getLogger(__name__).info("the engine at %s computes, and has not answered for %g s", url, seconds)


def _leaves_unanswered(address: str, key: str, seconds: float) -> bool:
    import httpx

    try:
        with httpx.Client(**client_options(address, key, seconds)) as client:
            client.get(address)
    except httpx.TimeoutException:
        return True
    except httpx.HTTPError:
        return False
    return False


def _processor_seconds(report: Mapping[str, Any]) -> float:
    """Return the processor seconds that the processes behind an API server have used; on another machine, the time."""
    if "pid" not in report:
        return time.monotonic()
    used = 0.0
    with suppress(psutil.Error):
        for process in psutil.Process(report["pid"]).children(recursive=True):
            with suppress(psutil.Error):
                times = process.cpu_times()
                used += times.user + times.system
    return used

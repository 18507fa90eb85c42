"""Services as flow runs on Prefect's work pools: what a run asks for, and the keys that it shares with its services.

Where `placement.services` is `pools`, the process that a run starts for a service is a stand-in
(`flows.services.stand_in`): it asks Prefect for a flow run of `serve`, waits for its address and gives it back. So a
service elsewhere is started, waited for, restarted, counted and ended like one on this machine.
"""

import hmac
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flows.services.process import ServiceFailed
from tasks.inference.engine.host import write_private
from tasks.runtime.process_variables import module_command

if TYPE_CHECKING:
    from configs.run import RunConfig

TOKEN = "STAGECOACH_TOKEN"
"""The variable with the secret that the machines of a run share: the run's own, and the workers of its pools."""
RENEWED, SEEN, ADDRESS = "stagecoach.renewed", "stagecoach.seen", "stagecoach.address"
"""Labels of a service's flow run: the run renews its lease, the service says that it lives, and where it answers."""
PULSE = "stagecoach.pulse"
"""Label of a learner's flow run: its second address."""
BEAT_SECONDS = 2.0
"""Between two looks at a flow run."""
BEATS_OF_A_LEASE = 6
"""How often in a lease either side writes that it is there."""
STAND_IN_NEEDS = ("PREFECT_*",)
"""The secrets that a stand-in gets."""


class RenewalWatch:
    """Whether the other side still writes that it is there, by looks at what it wrote: clocks of machines differ."""

    def __init__(self, seconds: float, look_seconds: float = BEAT_SECONDS) -> None:
        self._looks = round(seconds / look_seconds)
        self._last: Any = None
        self._left = self._looks

    def look(self, value: Any) -> bool:
        """Tell whether it holds after one more look, `look_seconds` or more after the last one; a new value renews it.

        Looks that Prefect did not answer are none: while it is away, or slow, nobody can renew anything.
        """
        self._left = self._looks if value != self._last else self._left - 1
        self._last = value
        return self._left > 0


def shared_key(config: "RunConfig", purpose: str) -> str:
    """Return a key of a run that its own machine and its services have: made of their token, the run and a purpose.

    Raises ServiceFailed where this process has no token.
    """
    if not (token := os.environ.get(TOKEN, "")):
        raise ServiceFailed(
            f"placement.services is pools, and {TOKEN} is not set here. Nothing was started: set it to the same long "
            f"secret where the run starts and where the workers of its pools start, for example {TOKEN}=$(openssl rand "
            "-hex 32)"
        )
    return hmac.new(token.encode(), f"{_store(config)}\n{config.name}\n{purpose}".encode(), "sha256").hexdigest()


def _store(config: "RunConfig") -> str:
    """Return the store as a worker finds it, which has a working directory of its own. Links are not followed."""
    return config.store if "://" in config.store else str(Path(config.store).expanduser().absolute())


def proof_of(config: "RunConfig", service: str, member: str, source: str) -> str:
    """Return what shows that a request was made with the token of these machines; it fits no other request."""
    return shared_key(config, "\n".join(("request", service, member, source, config.model_dump_json())))


def require_proof(proof: str, config: "RunConfig", service: str, member: str, source: str) -> None:
    """Raise ServiceFailed where a request for a service was not made with the token of this machine."""
    if not hmac.compare_digest(proof, proof_of(config, service, member, source)):
        raise ServiceFailed(
            f"the request for {service} of the run {config.name!r} was not made with the {TOKEN} of this machine. "
            "Nothing was started: start the run and the worker of this pool with the same one"
        )


def stand_in(config: "RunConfig", service: str, member: str, source: str, report: Path) -> list[str]:
    """Return the command of the process that stands in for a service of a run, `member` of those of its kind."""
    request = report.with_suffix(".request.json")
    config = config.model_copy(update={"store": _store(config)})
    asked = {
        "deployment": f"serve/{service}",
        "name": f"{service}-{config.name}" + (f"-{member}" if member else ""),
        "tags": ["stagecoach", f"for:{config.name}"],
        "lease_seconds": config.placement.lease_seconds,
        "parameters": {
            "service": service,
            "member": member,
            "source": source,
            "config": config.model_dump(mode="json"),
            "proof": proof_of(config, service, member, source),
        },
    }
    write_private(request, json.dumps(asked))
    return module_command("flows.services.stand_in", str(request), str(report))


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine; raises ServiceFailed where it has none."""
    found = psutil.net_if_addrs()
    for each in found.get(interface, ()):
        if each.family.name == "AF_INET":
            return str(each.address)
    raise ServiceFailed(
        f"placement.interface is {interface!r}, and this machine has no address there. Nothing was started: name one "
        f"that all machines of the pools have. Here there are: {', '.join(sorted(found))}"
    )

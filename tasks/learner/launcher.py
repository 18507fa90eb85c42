"""Starts the learner's processes on one node with torchrun: `python -m tasks.learner.launcher ARGUMENT ...`.

The arguments are torchrun's. Its own rendezvous opens a store that listens on all interfaces and knows no key. The one
that is made here is its static one, but for a store that listens at the address of the endpoint alone.
"""

import errno
import ipaddress
import socket

from torch.distributed import TCPStore, run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from tasks.learner.protocol import RENDEZVOUS


class BoundRendezvous(StaticTCPRendezvous):
    """The static rendezvous, whose first node listens at the endpoint's address; port 0 is a free one of one node."""

    def get_backend(self) -> str:
        """Return the name by which torchrun asks for it."""
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and this node's place among all; waits until all are there."""
        if self.rank == 0 and self._store is None and (listener := listener_at(self.master_addr, self.master_port)):
            self.master_port = listener.getsockname()[1]
            place = self.master_addr, self.master_port, self.world_size
            # The store closes the socket.
            self._store = TCPStore(*place, True, self.timeout, master_listen_fd=listener.detach())
        return super().next_rendezvous()


def listener_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an IPv4 address of this machine, or at the one that a name means everywhere.

    None for any other host. A name may mean loopback here (as in Debian's /etc/hosts) and the network elsewhere, and an
    address may be one that a gateway translates: torchrun then listens on all interfaces, as it does by itself.
    """
    if not (address := address_everywhere(host)):
        return None
    listener = socket.socket()
    # Whoever chose the port may keep it with a socket that does not listen.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return listener


def address_everywhere(host: str) -> str:
    """Return the one IPv4 address of a host; empty where another machine may know it by another one."""
    try:
        addresses = [*dict.fromkeys(socket.gethostbyname_ex(host)[2])]  # that of localhost may be there twice
    except OSError:
        return ""
    here_alone = ipaddress.IPv4Address(addresses[0]).is_loopback and host not in (addresses[0], "localhost")
    return "" if here_alone or len(addresses) > 1 else addresses[0]


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    rank, timeout = (int(parameters.config[name]) for name in ("rank", "timeout"))
    return BoundRendezvous(host, port, rank, parameters.max_nodes, parameters.run_id, timeout)


def main() -> None:
    """Start the processes as torchrun would."""
    rendezvous_handler_registry.register(RENDEZVOUS, _create)
    run.main()


if __name__ == "__main__":
    main()

"""The network of the fault suite: TCP proxies in front of the members of the replica set.

There are two sets, each of one proxy for each member and in one process. The members know each
other by the addresses of the inner set, so that it can keep members apart. Clients know only the
outer set. The members tell clients their addresses in every reply to ``hello``, so the outer
proxies replace them. All ports have five digits, so a message keeps its length.

``serve`` runs in the process; ``Proxies`` controls it from the program.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pyqueue import embedded
from tests.chaos.processes import Process
from tests.support.proxy import ProxyLink

REPLICA_SET = "pyqueue"  # as in the options of an embedded server


def url_of(ports: list[int], database: str = "") -> str:
    """Return the URL of the replica set whose members are reached at these ports."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return f"mongodb://{hosts}/{database}?replicaSet={REPLICA_SET}"


def serve(spec: dict[str, Any]) -> None:
    """Run the proxies until standard input ends.

    Each line of the input is ``[place, faults]``, with the arguments of ``ProxyLink.change``. The
    answer is a line with the counters of that proxy.

    Args:
        spec: ``ports`` holds for each proxy its port, the port of its member, and the port that
            the member announces.
    """

    async def main() -> None:
        names = [
            (f"127.0.0.1:{announced}".encode(), f"127.0.0.1:{ours}".encode())
            for ours, _, announced in spec["ports"]
            if ours != announced
        ]
        links = [ProxyLink(real, names, port=ours) for ours, real, _ in spec["ports"]]
        async with AsyncExitStack() as stack:
            for link in links:
                await stack.enter_async_context(link)
            print("{}", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                place, faults = json.loads(line)
                links[place].change(**faults)
                print(json.dumps(links[place].done), flush=True)

    asyncio.run(main())


class Proxies:
    """The process of the proxies, controlled by the program.

    Args:
        folder: A folder for the standard error of the process.
        targets: The ports of the members.
        announced: The ports that the members announce; None: the ports of these proxies.
    """

    def __init__(
        self, folder: Path, targets: list[int], announced: list[int] | None = None
    ) -> None:
        self.ports: list[int] = []
        while len(self.ports) < len(targets):
            port = embedded._free_port(0)
            if port not in (*targets, *self.ports, *(announced or ())):
                self.ports.append(port)
        ports = list(zip(self.ports, targets, announced or self.ports, strict=True))
        name = "proxies" if announced else "inner-proxies"
        self._process = Process("proxies", folder, {"ports": ports}, name)
        self._process.receive()  # they listen

    @property
    def url(self) -> str:
        """The URL of the replica set through the proxies.

        Its timeouts are short, so that clients soon notice a member that does not answer.
        """
        return url_of(self.ports, "faults") + "&connectTimeoutMS=2000&heartbeatFrequencyMS=1000"

    def change(self, place: int, **faults: Any) -> Counter[str]:
        """Change the faults of a proxy and return its counters; see ``ProxyLink``."""
        self._process.send([place, faults])
        return Counter(self._process.receive())

    def check(self) -> None:
        """Raise QueueError if the process has ended."""
        self._process.check()

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()

"""``python -m pyqueue.faults ROLE`` is a process of the suite; see ``processes``."""

from pyqueue.faults import load, proxies, witness
from pyqueue.faults.processes import begin

if __name__ == "__main__":
    begin({"load": load.work, "proxies": proxies.serve, "witness": witness.watch})

"""``python -m tests.chaos.roles ROLE`` is a process of the suite; see ``processes``."""

from tests.chaos import change_log, proxies, workload
from tests.chaos.processes import begin

if __name__ == "__main__":
    begin({"load": workload.work, "proxies": proxies.serve, "witness": change_log.watch})

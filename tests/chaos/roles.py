"""``python -m tests.chaos.roles ROLE`` is a process of the fault suite; see ``processes``."""

from tests.chaos import change_log, drivers, proxies, redis_server, transaction
from tests.chaos.processes import start_role

if __name__ == "__main__":
    start_role(
        {
            "workload": drivers.work,
            "proxies": proxies.serve,
            "change_log": change_log.watch,
            "redis": redis_server.serve,
            "transaction": transaction.hold,
        }
    )

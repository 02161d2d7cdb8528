"""``python -m tests.chaos.roles ROLE`` is a process of the fault suite; see ``processes``."""

from tests.chaos.processes import start_role

#: The module and the function of each role. A process imports only this module: a run starts
#: more than ten processes at once.
ROLES = {
    "workload": ("drivers", "work"),
    "proxies": ("proxies", "serve"),
    "change_log": ("change_log", "watch"),
    "redis": ("redis_server", "serve"),
    "transaction": ("transaction", "hold"),
}

if __name__ == "__main__":
    start_role(ROLES)

"""Run ``python -m pyqueue.cli`` as ``pyqueue``."""

from pyqueue.cli import app

if __name__ == "__main__":
    app(prog_name="pyqueue")

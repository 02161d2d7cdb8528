"""One replica of a pipeline with a Python stage and a Spark stage, as a separate process.

Run it with ``python -m tests.spark.replica URL MEMBERS``. ``Frame`` stands in for a DataFrame, so
the process needs no JVM. It runs until it is killed.
"""

from __future__ import annotations

import sys
import time

from pyqueue import Client
from pyqueue.pipeline import spark_stage
from pyqueue.spark import batches
from tests.spark.fakes import Frame, fake_frame, no_session


def slow(frame: Frame) -> Frame:
    """Pass a batch on after a while, so that a kill meets a batch."""
    time.sleep(0.05)
    return frame


def main(url: str, members: str) -> None:
    """Move messages from "a" over "b" to "c"."""
    vars(batches)["frame"] = fake_frame
    vars(spark_stage)["_session"] = no_session
    with Client(url) as client:
        pipeline = client.pipeline("replica")
        pipeline.link("a", lambda payload: payload, to="b", lease=2)
        pipeline.spark("b", slow, to="c", max_messages=20, lease=4, members=int(members))
        pipeline.run()


if __name__ == "__main__":
    main(*sys.argv[1:])

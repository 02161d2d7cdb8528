"""kombu on MongoDB, with its SimpleQueue."""

import json
import queue
import sys
import time
import uuid

try:
    from kombu import Connection  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    print(json.dumps({"skipped": "pip install kombu pymongo"}))
    sys.exit()


def main(url: str, count: int) -> None:
    separator = "&" if "?" in url else "?"
    with Connection(f"{url}{separator}w=majority&journal=true") as connection:
        jobs = connection.SimpleQueue(f"kombu{uuid.uuid4().hex[:8]}")
        received = []
        start = time.perf_counter()
        for number in range(count):
            jobs.put({"n": number, "text": "x" * 167})
        middle = time.perf_counter()
        while True:
            try:
                message = jobs.get(block=False)
            except queue.Empty:
                break
            received.append(message.payload["n"])
            message.ack()
        end = time.perf_counter()
        jobs.close()
    times = {"push": middle - start, "receive": end - middle}
    print(json.dumps(times | {"received": len(received), "distinct": len(set(received))}))


main(sys.argv[1], int(sys.argv[2]))

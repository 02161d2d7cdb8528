"""The loop that a user of raw pymongo would write."""

import json
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

try:
    import pymongo
except ImportError:
    print(json.dumps({"skipped": "pip install pymongo"}))
    sys.exit()


def main(url: str, count: int) -> None:
    with pymongo.MongoClient[dict[str, Any]](
        url, tz_aware=True, w="majority", journal=True
    ) as mongo:
        collection = mongo.get_default_database()[f"raw{uuid.uuid4().hex[:8]}"]
        collection.create_index([("when", 1), ("_id", 1)])
        received = []
        start = time.perf_counter()
        for number in range(count):
            collection.insert_one({"when": datetime.now(UTC), "n": number, "text": "x" * 167})
        middle = time.perf_counter()
        while True:
            now = datetime.now(UTC)
            lease = {"$set": {"when": now + timedelta(seconds=60), "token": uuid.uuid4().hex}}
            found = collection.find_one_and_update(
                {"when": {"$lte": now}}, lease, sort=[("when", 1), ("_id", 1)]
            )
            if found is None:
                break
            collection.delete_one({"_id": found["_id"], "token": lease["$set"]["token"]})
            received.append(found["n"])
        end = time.perf_counter()
        collection.drop()
    times = {"push": middle - start, "receive": end - middle}
    print(json.dumps(times | {"received": len(received), "distinct": len(set(received))}))


main(sys.argv[1], int(sys.argv[2]))

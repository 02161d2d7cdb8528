"""``python -m pyqueue.demo FD``: a consumer process of the demo. FD is the pipe to its parent."""

import sys
from multiprocessing.connection import Connection

from pyqueue.demo.consumer import consume

if __name__ == "__main__":
    consume(Connection(int(sys.argv[1])))

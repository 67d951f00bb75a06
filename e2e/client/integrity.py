"""Compare the values that a queue stores twice. Print the differences.

Arguments: queue, URL, password and authorities of Redis.
"""

import json
import sys

from ballast_queue.redis_store import Queue

queue, url, password, ca = sys.argv[1:]
print(json.dumps(Queue.connect(url, queue, password=password, ca=ca or None).check_integrity()))

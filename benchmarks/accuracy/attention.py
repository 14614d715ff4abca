"""Print what an attention benchmark holds before its backward pass, for each of its shapes.

Start it in a checkout of subha-v/assignment2-systems. Its 100 timed iterations leave the same memory as 3.
"""

import json
import sys

sys.path.insert(0, "")
import cs336_systems.benchmark_attention as benchmark

benchmark.TIMED_ITERS = 3
print(json.dumps([benchmark.time_one_config(d, n) for d in benchmark.D_MODEL_VALUES for n in benchmark.SEQ_LEN_VALUES]))

"""Seconds of a benchmark: those of the wall, or with BENCH_CLOCK=process those that all cores spent on this program.

The latter are for comparing two ways on a machine with other work (OMP_WAIT_POLICY=passive, or waiting counts, too).
"""

import os
import time

seconds = time.process_time if os.environ.get("BENCH_CLOCK") == "process" else time.perf_counter

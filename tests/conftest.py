"""Settings of the whole test run. Imports nothing heavy: the cache is tested without torch."""

import os

# The models here are so small that a second thread costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

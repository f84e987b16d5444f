"""Tests run side by side, and ranks beside them: threads of one process that wait by spinning would take their cores.

Set before torch is imported, which reads them once.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

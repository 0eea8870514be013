"""What the server and the zygote of its workers say to each other, over sockets of whole messages.

An order is `ORDER` with four descriptors: the new worker's socket, where it prints, where its life
is told, and its work page. Where its life is told the process's id arrives with a descriptor of the
process, and when it has ended its status, as of `subprocess`. The zygote says `READY` once its
imports are done.
"""

from __future__ import annotations

import struct

ORDER, READY = b"f", b"r"
NUMBER = struct.Struct("<q")
NUM_ORDERED = 4
EXIT_UNFIT = 76
"""It must not fork here; what it printed says why."""
EXIT_SANDBOX_LOST = 77
"""A worker without its sandbox can take nothing in; whoever ended that, no request did."""
STATUS_UNKNOWN = 1 << 16
"""No status of any process: the zygote ended before the worker, and with it who could ask."""

"""The time in which this worker ran. The thread that sends its heartbeats looks regularly."""

from __future__ import annotations

from runtime.running_time import RunningTime

running_s = RunningTime().look
"""What deadlines of requests go by, as with `time.monotonic`."""

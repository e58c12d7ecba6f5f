"""How the threads of one actor wait for each other between two matrix products."""

from __future__ import annotations

# Environment variables of every actor. GNU OpenMP reads both, others the first. A thread looks for
# work for half a millisecond at most, then sleeps. To sleep at once costs two threads a quarter of
# their speed, since products of small matrices end sooner than a thread wakes up. To look longer
# takes the core that another actor was promised.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}

"""Compare Ballast's policy with baselines on the same traffic.

Law: every row of a table replays the same traffic on the same engine from the same seed, and every row is judged by the
same SLO. Rows do not depend on the number of processes that compute them.
"""

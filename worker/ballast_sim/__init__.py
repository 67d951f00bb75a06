"""Run the shipped policy in virtual time, compare it with other policies, and plan GPUs with it.

Law: deterministic. Time is the simulated clock, and randomness comes from a seed. Only `validation` measures real time.

- `replay` runs traffic through simulated replicas and reports what happened.
- `comparison` runs the policy and its baselines on the same traffic (`ballast bench mixed`).
- `validation` compares the simulator with the engine (`ballast bench validate`).
- `planner` computes GPUs, costs and batch ceilings (`ballast plan`).

`comparison`, `validation` and `planner` use `replay` and do not import each other.
"""

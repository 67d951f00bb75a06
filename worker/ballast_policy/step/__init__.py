"""Plan one step: `planner.plan(snapshot)` returns a `StepPlan`.

Law: pure. A plan depends on its snapshot alone. Nothing here outlives a step: what an engine learns and remembers
reaches the plan as a value in the snapshot.
"""

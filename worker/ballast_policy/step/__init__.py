"""Plan one step: `planner.plan(snapshot)` returns a `StepPlan`.

Law: pure. A plan depends on its snapshot alone, which has all that an engine learns and remembers.
"""

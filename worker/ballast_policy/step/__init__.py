"""Plan one step: `planner.plan(snapshot)` returns a `StepPlan`.

Law: pure. A plan depends on its snapshot alone: what an engine learns and remembers reaches it as a value in there.
"""

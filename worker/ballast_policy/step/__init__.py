"""Plan one step: `planner.plan(snapshot)` returns a `StepPlan`. Law: pure. A plan depends on its snapshot alone."""

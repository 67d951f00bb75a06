"""Learn what a plan may rely on. Law: each learner gets events from the host, and publishes a frozen value."""

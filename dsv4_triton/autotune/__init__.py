"""Search spaces, tuning and the shipped launch configs."""

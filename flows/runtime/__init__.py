"""What runs a pipeline: session, pipeline, executor, loops, and what they prepare."""

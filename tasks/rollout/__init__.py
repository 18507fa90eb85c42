"""Rollout: tries every assigned example with a policy; demonstrations and regrades in its place."""

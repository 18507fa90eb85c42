"""The room for sampling: engines, environment servers, and traces turned into rows."""

"""Services of a run: engines, environment servers, the learner and graders, and what ends them whatever happens."""

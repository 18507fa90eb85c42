"""The read model: what a store holds, as plain frames and values; nothing is printed and no page is laid out here.

- store_reader, request: one store opened to be read, what was derived of it, and what a page asks
- step_history: which stage results belong to which step
- row_lineage: what a typed id names, and which row came from which
- views: what the SQL views of `storage/read/views` read beside stored tables, and their rows as frames
- runs, run_state, watched, scores: all runs, the state of one, what of it is new, what its policies
  scored
- metrics, charts: the numbers of steps out of table `metrics`, as series and as the charts of
  `flows/reporting/figures.toml`, and what all replies say of steps
- notes: what people wrote on runs and rollouts
- conditions, condition_process, rollout_search: what conditions say of rollouts, which of a run meet one, and what
  changed in replies between two policies
- tracked_rows: what is sent of a run to W&B and TensorBoard
- step, rollouts, rollout_list: a step, the rollouts of a step, of an evaluation or of an example, and lists of them
- trace, messages: one rollout with its outcome, and its conversation
- reader: what rollouts said, under each other
- tokens, batch: tokens with all that was measured of them, in colours, and the packed batch
- compare: two runs side by side
- proof: what a store records, checked against its own files
- reward_try, reward_figures: what another reward says of stored rollouts, beside the recorded one
- mismatch: how far the learner's log-probs are from the engine's, and where
"""

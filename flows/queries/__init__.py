"""The read model: what a store holds, as plain frames and values; nothing is printed and no page is laid out here.

- store_reader, cache, request: one store opened to be read, what was derived of it, and what a page asks
- recorded_run, identify: a run by its name and config; what a typed id names
- step_history: which stage results belong to which step; outcomes: what became of every rollout; why: and why
- row_lineage, sentences: which row came from which, and rows in words
- runs, run_state, scores: all runs, the state of one, what its policies scored; shared_slices: what it shares
- step_metrics, metrics, series, charts, timeline: the numbers of steps out of table `metrics`, and when stages ran
- step, step_figures, rollouts, rollout_columns, rollout_choice, example: the rollouts of a step, or of one example
- trace, trace_neighbours, messages, message_parts: one rollout and its conversation
- tokens, shown_tokens, token_colours, batch: tokens with all that was measured of them, and the packed batch
- compare, compare_rows, compare_traces, compare_summary: two runs side by side
"""

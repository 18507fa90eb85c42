"""The frames behind every page: read from the tables, told apart by nothing but what the ledger names.

- runs, run, run_scores, run_states: the list of runs, one run, its steps, evaluations and state
- series, series_charts: what was measured by step, and what of it is
  drawn; metrics, metric_words: every number of it by name, and what each one is
- shared, timeline, timeline_lanes: the ledger with what other runs share, and when work was done
- step, step_traces, step_figures, step_columns, step_choice, step_search, step_evaluations, step_mismatch, groups: the
  traces of a step or an evaluation, how they are chosen, and their groups
- trace, trace_index, trace_walk, trace_use, trace_facts, training: one rollout, where it is, what is before and
  after it, which run uses it, what came of it
- messages, messages_read, messages_window, images: what was said
- tokens, tokens_colourings, tokens_shades, tokens_shown, tokenizers: every token with what each table says of it
- example, attempts: an example and all tries at it
- batch, batch_row, batch_texts: packed rows, their samples and tokens
- compare, compare_*: two runs, two steps, two attempts side by side
- shared_reads: what is read in one look and kept one by one; retired: rows that were dropped for their age
"""

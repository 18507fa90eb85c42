-- rollouts: one rollout that a run uses, as it was scored last, evaluations included
-- only where named: prompt, reply, record, info, error_traceback, mismatch_kl
select
    traces.* replace (lineages.run as run),  -- columns of `traces`; `run` is the run that uses the rollout, `step` the step in it
    lineages.for_training,  -- false of rollouts that score a policy, whose step is the policy's version
    traces.num_output_tokens as length,  -- tokens sampled, as num_output_tokens
    rollout_outcomes.outcome,  -- trained, filtered, errored, ...
    rollout_outcomes.detail,  -- the filter or the class of error that decided its outcome
    rollout_samples.advantage,  -- reward minus baseline, as the algorithm has it; null without a sample
    rollout_samples.baseline,  -- what was subtracted from the reward
    rollout_texts.prompt,  -- contents of the messages that the policy was given, in order, a line break between them
    rollout_notes.note,  -- what people noted on it with `stagecoach note`, a line for each note
    rollout_notes.tags,  -- its tags, a space between them
    rollout_texts.reply,  -- what the policy wrote, in order: thoughts, contents, tool calls as JSON
    rollout_outcomes.keep,  -- whether the filters keep it; null before they have judged it
    rollout_outcomes.reason,  -- filter that decided against it
    rollout_outcomes.detected,  -- filters that found something, also those that only report
    case when outcome <> 'expired' then outcome = 'trained' end as trained,  -- whether a policy was trained on it; null where that is no longer known
    case when policy_key <> '' then rollout_mismatch.mismatch_kl end as mismatch_kl,  -- mean of r - 1 - log r over its tokens with rl weight, r the learner's probability over the engine's; null where it was not trained on
    rollout_samples.num_samples,  -- training samples made of it; null without any
    traces.staleness > 0 as stale,  -- whether an older policy than the step's sampled it
    traces.num_input_tokens + traces.num_output_tokens as num_tokens,  -- tokens read and sampled
    traces.setup_seconds + traces.generation_seconds + traces.scoring_seconds as seconds  -- wall-clock of set-up, generation and scoring
from lineages
join traces on traces.key = lineages.traces
left join slice_order on slice_order.attempt = traces.attempt
left join rollout_outcomes on rollout_outcomes.run = lineages.run and rollout_outcomes.key = traces.key and rollout_outcomes.trace_id = traces.trace_id  -- only for outcome, detail, keep, reason, detected, trained
left join rollout_samples on rollout_samples.run = lineages.run and rollout_samples.key = traces.key and rollout_samples.trace_id = traces.trace_id  -- only for advantage, baseline, num_samples
left join rollout_mismatch on rollout_mismatch.run = lineages.run and rollout_mismatch.key = traces.key and rollout_mismatch.trace_id = traces.trace_id  -- only for mismatch_kl
left join rollout_texts on rollout_texts.key = traces.key and rollout_texts.trace_id = traces.trace_id  -- only for prompt, reply
left join rollout_notes on rollout_notes.trace_id = traces.trace_id  -- only for note, tags
-- In the order in which the stages handed them over, which tables do not keep.
order by lineages.for_training desc, traces.step, lineages.place, slice_order.place, traces.seq

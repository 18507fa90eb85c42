-- rollout_texts: one rollout with messages
select
    key,  -- work that made its trace; rollouts that were scored again share the messages
    trace_id,  -- rollout
    string_agg(content, chr(10) order by message) filter (where not sampled) as prompt,  -- contents of the messages that the policy was given, in order, a line break between them
    string_agg(
        if(more is null, content, nullif(concat_ws(chr(10), thoughts, content, nullif(more ->> '$.tool_calls', 'null')), '')),
        chr(10) order by message
    ) filter (where sampled) as reply  -- what the policy wrote, in order: thoughts, contents, tool calls as JSON
from message_texts
group by all

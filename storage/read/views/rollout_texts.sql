-- rollout_texts: one rollout with messages
select
    key,  -- work that made its trace; rollouts that were scored again share the messages
    trace_id,  -- rollout
    string_agg(content, chr(10) order by message) filter (where not sampled) as prompt,  -- contents of the messages that the policy was given, in order, a line break between them
    string_agg(said, chr(10) order by message) filter (where sampled) as reply  -- what the policy wrote, in order: thoughts, contents, tool calls as JSON
from (
    select
        message_sources.key,
        messages.trace_id,
        messages.message,
        messages.sampled,
        messages.content,
        -- Most bodies say no more than the content: JSON is read of the others alone.
        case
            when regexp_matches(body, '"(tool_calls|reasoning_content)"\s*:\s*["\[{]') then nullif(concat_ws(
                chr(10), body ->> '$.reasoning_content', content, nullif(body ->> '$.tool_calls', 'null')
            ), '')
            else content
        end as said
    from message_sources
    join messages on messages.key = message_sources.messages
)
group by all

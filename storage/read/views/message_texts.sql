-- message_texts: one message of a rollout
select
    message_sources.key,  -- work that made its trace; rollouts that were scored again share the messages
    messages.trace_id,  -- rollout
    messages.message,  -- number of the message in its rollout
    messages.sampled,  -- whether the policy sampled it
    messages.content,  -- text content
    -- Most bodies say no more than the content: JSON is read of the others alone. A malformed body is none.
    try_cast(
        case when regexp_matches(body, '"(tool_calls|reasoning_content)"\s*:\s*["\[{]') then body end as json
    ) as more,  -- its body, where that has thoughts or tool calls
    more ->> '$.reasoning_content' as thoughts,  -- thoughts
    concat_ws(
        chr(10), content, thoughts, array_to_string(list_concat(
            more ->> '$.tool_calls[*].function.name', more ->> '$.tool_calls[*].function.arguments',
            more ->> '$.tool_calls[*].name', more ->> '$.tool_calls[*].arguments'
        ), chr(10))
    ) as texts  -- content, thoughts, and names and arguments of tool calls, a line break between them
from message_sources
join messages on messages.key = message_sources.messages

-- sample_weights: what the tokens of a sample in a row of a packed batch weigh together
select
    key,  -- work that packed the batch
    "row",  -- row of the batch, from 0
    place,  -- sample of the row, from 0
    sum(rl_weights::double order by token) as rl_weights,  -- sum of the weights in the rl loss
    sum(ce_weights::double order by token) as ce_weights,  -- sum of the weights in the ce loss
    sum(ref_kl_weights::double order by token) as ref_kl_weights,  -- sum of the weights in the ref_kl loss
    count(*) filter (where rl_weights <> 0 or ce_weights <> 0 or ref_kl_weights <> 0) as num_weighted  -- tokens with any weight
from batch_tokens
where place is not null
group by all

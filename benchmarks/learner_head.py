"""Time and memory of log-probs at the output head: chunked, in one pass, with whole logits, and torch's fused loss.

`python -m benchmarks.learner_head METHOD` prints one line; each method has a process of its own, because the peak of
resident memory never goes down again. `--tokens` and `--chunk` choose the problem.
"""

import argparse
import json
import resource
import time

VOCABULARY, WIDTH = 151_936, 512


def plain(hidden, weight, targets, chunk):
    """Return log-probs from logits of all tokens at once."""
    return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def plain_with_entropy(hidden, weight, targets, chunk):
    """Return log-probs plus entropies (summed, so that both get gradient) from logits of all tokens at once."""
    logp = (hidden @ weight.T).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1) - (logp.exp() * logp).sum(-1)


def chunked(hidden, weight, targets, chunk):
    """Return the learner's log-probs plus entropies."""
    from tasks.learner.head import token_logprobs

    return sum(token_logprobs(hidden, weight, targets, hidden.new_ones(len(hidden)), chunk))


def one_pass(hidden, weight, targets, chunk):
    """Return the learner's loss of one pass, here the sum of log-probs; values are measured on the way."""
    from tasks.learner.head import fused_loss

    return fused_loss(hidden, weight, targets, hidden.new_ones(len(hidden)), chunk, lambda logp, part: logp.sum())[0]


def fused(hidden, weight, targets, chunk):
    """Return torch's linear cross-entropy, which knows no temperature and no entropy."""
    import torch
    from torch.nn.functional import linear_cross_entropy

    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)


METHODS = {method.__name__: method for method in (plain, plain_with_entropy, chunked, one_pass, fused)}


def measure(method: str, sizes: argparse.Namespace) -> dict:
    """Run forward and backward once; return CPU seconds and the rise of peak resident memory in MiB."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (sizes.tokens,))
    weight.grad = torch.zeros_like(weight)
    METHODS[method](hidden[:8], weight[:1000], targets[:8] % 1000, 4).sum().backward()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    METHODS[method](hidden, weight, targets, sizes.chunk).sum().backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"method": method, "cpu_seconds": round(seconds, 2), "extra_peak_mib": round((peak - before) / 1024)}


def main() -> None:
    """Measure the method that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64)
    sizes = parser.parse_args()
    print(json.dumps(measure(sizes.method, sizes)))


if __name__ == "__main__":
    main()

"""Time and memory of log-probs at the output head: chunked, in one pass, with whole logits, and torch's fused loss.

`python -m benchmarks.learner_head` prints one line per method; each runs in a process of its own, because the peak of
resident memory never goes down again. `--vocabulary`, `--width`, `--tokens` and `--chunk` choose the problem.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable


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


METHODS: dict[str, Callable] = {
    "plain": plain,
    "plain_with_entropy": plain_with_entropy,
    "chunked": chunked,
    "one_pass": one_pass,
    "fused": fused,
}


def measure(method: str, sizes: argparse.Namespace) -> dict:
    """Run forward and backward once; return CPU seconds and the rise of peak resident memory in MiB."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.width, requires_grad=True)
    weight = (torch.randn(sizes.vocabulary, sizes.width) * 0.02).requires_grad_()
    targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,))
    weight.grad = torch.zeros_like(weight)
    METHODS[method](hidden[:8], weight[:1000], targets[:8] % 1000, 4).sum().backward()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    METHODS[method](hidden, weight, targets, sizes.chunk).sum().backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"method": method, "cpu_seconds": round(seconds, 2), "extra_peak_mib": round((peak - before) / 1024)}


def main() -> None:
    """Measure every method in a process of its own, or the one that is named in this one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--method", choices=METHODS)
    sizes = parser.parse_args()
    if sizes.method:
        print(json.dumps(measure(sizes.method, sizes)))
        return
    seconds = {}
    for method in METHODS:
        command = [sys.executable, "-m", "benchmarks.learner_head", *sys.argv[1:], "--method", method]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(line, end="", flush=True)
        seconds[method] = json.loads(line)["cpu_seconds"]
    ratio = round(seconds["chunked"] / seconds["one_pass"], 2)
    print(
        json.dumps(
            {
                "two_passes_over_one": ratio,
                "machine": platform.processor() or platform.machine(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    )


if __name__ == "__main__":
    main()

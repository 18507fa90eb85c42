"""Exchange: rollouts of others as rows of traces and messages, and rows as the files that others read."""

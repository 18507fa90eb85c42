"""The viewer: runs, rollouts and gradients to look at, on a page, on a terminal and in a notebook. It only reads."""

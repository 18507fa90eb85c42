"""The viewer: runs, rollouts and gradients to look at, on a page, on a terminal and in a notebook. It only reads.

What is where, from the store to the eye:

- library: one store, opened to be read, and what was derived from its keys (kept, as much as fits in memory: weights)
- data: the frames behind every page; the first word of a file's name is the page or the noun that it serves
- pages: one file per address, from the library and what was asked to plain values; these are the JSON of a page
- drawing: SVG from plain values
- web: the application, its guard, templates, static files, and a page as one file (saving)
- terminal: `stagecoach traces` and `stagecoach trace`; notebook: the frames for a person who writes Python
- addresses: where everything is; page: what a page is and is asked; texts: hostile text made visible; words: numbers
  and times as a person reads them; serving: the process that listens
"""

"""The viewer: runs, rollouts and gradients to look at, on a page, on a terminal and in a notebook. It only reads.

What is where, from the store to the eye:

- flows.queries: the frames behind every page, from one store opened to be read
- pages: from the store and what was asked to plain values; these are the JSON of a page
- drawings: charts and pictures from plain values; templates and static: how a page is laid out
- addresses: the routes, which write and read addresses; routes: the function that reads each page
- rendering: a page as HTML, JSON or one file to keep
- app: the application and its guard; serving: the process that listens
- terminal: `stagecoach trace`; notebook: the frames for a person who writes Python
- flows.reporting.formats: numbers and times as a person reads them, hostile text made visible
"""

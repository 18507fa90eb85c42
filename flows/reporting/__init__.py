"""How a run shows itself while it goes on, and how numbers, texts and curves are written everywhere."""

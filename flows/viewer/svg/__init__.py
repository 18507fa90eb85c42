"""Drawings: plain values as SVG text, coloured by classes, so that pages in light and dark share them."""

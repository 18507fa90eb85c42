"""To be written."""

from flows.viewer.library import Library
from flows.viewer.page import Asked, NotThere, Page


def page(library: Library, asked: Asked) -> Page:
    """Stand in until the page is written."""
    raise NotThere("this page is not written yet")

"""The same pages as a tool server with a name, which is the beginning of its tools' names."""

from sample_wikispeedia.server import PagesServer


class NamedPagesServer(PagesServer):
    """Opens pages, by `pages_click_link` and `pages_go_back`."""

    TOOL_PREFIX = "pages"


if __name__ == "__main__":
    NamedPagesServer.run()

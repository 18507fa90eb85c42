"""What is wrong with somebody's data, said so that it can be mended."""


class DataUnusable(ValueError):
    """The data, or the settings that say how to read it, cannot be used."""

"""The commands of the command line, one file for each group; every file adds its own with `add`."""

"""What must hold between the sections of a config, one file for each subject."""

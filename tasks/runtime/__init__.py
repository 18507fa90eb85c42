"""What runs a stage: its record, the services that it may ask, and how often a lost one is waited for."""

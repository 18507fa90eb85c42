"""In which order: the Prefect flows, the services that live as long as a run, and the command line."""

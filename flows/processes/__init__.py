"""What lives as long as a run: services, who watches them, and who ends them whatever happens."""

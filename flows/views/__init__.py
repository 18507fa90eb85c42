"""What people and programs see of a store and a run: tables on the terminal, JSON, pictures, panels."""

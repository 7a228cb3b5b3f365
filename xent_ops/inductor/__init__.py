"""What is for Inductor alone."""

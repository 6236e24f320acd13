"""What people see of a line on a terminal."""

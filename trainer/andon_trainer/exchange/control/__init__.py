"""Control: small messages between a worker and its coordinator, and the transfer of state."""

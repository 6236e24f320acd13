"""The coordinator's adapters: gRPC, the journal, and the task that owns the line's core."""

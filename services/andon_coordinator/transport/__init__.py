"""The coordinator's adapters: gRPC, the journal, and what owns the line's core."""

"""The ring: workers exchange with each other, over gRPC or plain TCP."""

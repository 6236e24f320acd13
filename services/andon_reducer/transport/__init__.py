"""The reducer on gRPC: messages to events, effects to messages."""

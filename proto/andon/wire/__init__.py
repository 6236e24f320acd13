"""The protocol as bytes: protobuf messages, framing of bulk data, gRPC statuses."""

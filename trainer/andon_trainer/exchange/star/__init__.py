"""The star: workers exchange with reducers, over gRPC, plain TCP or shared memory."""

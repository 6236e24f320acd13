"""The worker's two streams: control to the coordinator, blocks to the reducer."""

"""The Open Inference Protocol over gRPC. Needs what `batchmill[grpc]` installs, so only a name table imports it."""

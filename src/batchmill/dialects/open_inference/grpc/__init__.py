"""The Open Inference Protocol over gRPC. It needs the packages of `batchmill[grpc]`, so it is imported by name only."""

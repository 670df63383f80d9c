"""The Open Inference Protocol over gRPC. Needs the packages of `batchmill[grpc]`; only `server` is imported from outside."""

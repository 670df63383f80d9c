"""Language models that batchmill serves itself: deployments of callers, and models that jobs define."""

"""Language models that batchmill serves itself, as callers deploy them and jobs ask for them."""

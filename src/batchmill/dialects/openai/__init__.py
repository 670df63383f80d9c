"""OpenAI's API: files, uploads, batches, models, live inference, webhooks. Source: OpenAI's API reference."""

"""Pictures in prompts: reading, their identity, and when their embeddings are computed."""

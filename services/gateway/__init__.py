"""The HTTP edge: OpenAI requests in, server-sent events out. Keeps no state of its own."""

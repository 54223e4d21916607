"""Anthropic's Messages endpoints, translated to the same requests and written from the same chunks as OpenAI's."""

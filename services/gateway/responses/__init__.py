"""OpenAI's Responses endpoints: the same requests and chunks as elsewhere, and a record to find a response again."""

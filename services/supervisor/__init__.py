"""One machine's processes: starts, watches, restarts and stops nats-server and the services."""

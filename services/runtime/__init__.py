"""What every service shares and nothing else: bus, lifecycle, settings, telemetry, the model file."""

"""The front door: validates and encodes requests, stores them as work, and turns tokens back into text."""

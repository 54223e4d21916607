"""The command `natterjack`: everything a person does from a shell."""

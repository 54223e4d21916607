"""layers: the arithmetic between attention and attention, as functions of tensors. Owns no state."""

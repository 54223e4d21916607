"""weights: reading model files. Owns file formats; knows no architecture and no engine."""

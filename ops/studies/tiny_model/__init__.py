"""hearth-tiny: how the embedded model is made and measured."""

"""The live state of a training: model, optimizers, random numbers and data position."""

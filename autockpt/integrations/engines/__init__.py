"""Adapters of engines that own the optimizer's step, or the whole loop."""

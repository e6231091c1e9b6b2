"""The position in the data: loaders, their samplers, and the generators that shuffle."""

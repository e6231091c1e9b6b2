"""Tests of images that are written without a training."""

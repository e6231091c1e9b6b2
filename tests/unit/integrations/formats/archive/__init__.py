"""Tests of `autockpt/integrations/formats/archive`."""

"""Tests of `autockpt/integrations/formats/tree`."""

"""Tests of `autockpt/integrations/tree`."""

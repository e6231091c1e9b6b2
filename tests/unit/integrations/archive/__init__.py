"""Tests of `autockpt/integrations/archive`."""

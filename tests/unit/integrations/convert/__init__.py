"""Tests of `autockpt/integrations/convert`."""

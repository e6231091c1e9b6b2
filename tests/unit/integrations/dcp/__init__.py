"""Tests of `autockpt/integrations/dcp`."""

"""Tests of `autockpt/integrations/formats/convert`."""

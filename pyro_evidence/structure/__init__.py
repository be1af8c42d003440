"""The structure of one density, found by derivatives."""

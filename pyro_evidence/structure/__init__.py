"""What one density is made of, found by derivatives."""

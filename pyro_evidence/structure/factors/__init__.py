"""The factors of a log joint density: which coordinates each touches, and its second derivatives in them."""

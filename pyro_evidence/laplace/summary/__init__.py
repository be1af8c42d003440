"""What a posterior says of itself: a table of its numbers, under the names of the user's own columns."""

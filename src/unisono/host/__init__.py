"""What ranks of one host share."""

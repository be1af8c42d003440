"""What a posterior says of data that the fit has not seen."""

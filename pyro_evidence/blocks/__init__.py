"""Independent blocks, such as groups, integrated by quadrature given what they share."""

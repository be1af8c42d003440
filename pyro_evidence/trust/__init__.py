"""How far a mode and its curvature can be trusted, found out beside them: corners, plateaus."""

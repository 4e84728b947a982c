"""The paper's tables and figures: which runs they need, what was found, and what that says about each claim."""

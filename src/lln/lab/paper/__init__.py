"""The paper's analysis figures from scratch, each with the claim it is for and what the numbers say about it."""
